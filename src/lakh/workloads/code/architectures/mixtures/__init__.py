"""Architectures whose feed-forward is a mixture of experts, in some blocks or in all."""
