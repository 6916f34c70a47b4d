"""From bytes to documents: languages, tokens, text features and the order of a repository's files."""
