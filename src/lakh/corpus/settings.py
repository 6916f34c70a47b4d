"""The settings of a corpus build: everything, besides the sources, that decides what a corpus contains."""

from __future__ import annotations

from dataclasses import dataclass, field

from lakh import config
from lakh.corpus.dedup.near import NearDedupSettings
from lakh.corpus.filters.decontaminate import DecontaminationSettings
from lakh.corpus.filters.licence import LicenceSettings
from lakh.corpus.filters.quality import QualitySettings
from lakh.corpus.parsing.read_files import FileFilterSettings
from lakh.corpus.secrets import SecretSettings
from lakh.errors import ConfigError

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything, besides the sources, that decides what a corpus contains."""

    filters: FileFilterSettings = field(default_factory=FileFilterSettings)
    licences: LicenceSettings = field(default_factory=LicenceSettings)
    near: NearDedupSettings = field(default_factory=NearDedupSettings)
    quality: QualitySettings = field(default_factory=QualitySettings)
    secrets: SecretSettings = field(default_factory=SecretSettings)
    decontaminate: DecontaminationSettings = field(default_factory=DecontaminationSettings)
    per_repo_bytes: int = 0
    """Bytes of text to keep of one repository; 0 sets no limit."""
    seed: int = 0
    """Decides which files of a repository stay when it has more than its share."""
    dropped_texts: bool = False
    """Also write the texts of dropped documents, as far as they were read, beside their reasons."""
    split_bytes: int = 16_000_000
    """Source bytes in one split: the unit of work and of resume; each split gives at most one shard."""

    def __post_init__(self) -> None:
        config.require_positive(self, "split_bytes")
        if self.per_repo_bytes < 0:
            raise ConfigError("per_repo_bytes", f"{self.per_repo_bytes} is negative", "use 0 for no limit")
        if not 0 <= self.seed < 2**63:
            raise ConfigError("seed", f"{self.seed} is out of range", "choose 0 up to 2**63 - 1")
