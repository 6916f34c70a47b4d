"""The input of `lakh bench corpus`: published packages by name, version and hash, in eight languages.

Sdists, npm packages and Debian sources, fetched into lakh's cache. A package with another hash is an error; a package
that its index no longer has is reported and left out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lakh import storage
from lakh.corpus.sources.packages import fetch
from lakh.errors import DataError, LakhError

__all__ = ["PINNED", "fetch_pinned"]

# source -> SHA-256 of its archive; about 380 MB of code, at least 20 MB in each of Python, JavaScript, TypeScript,
# Java, Go, Rust, C and C++.
PINNED = {
    "pypi:sympy==1.13.3": "b27fd2c6530e0ab39e275fc9b683895367e51d5da91baa8d3d64db2565fec4d9",
    "pypi:django==5.1.4": "de450c09e91879fa5a307f696e57c851955c910a438a35e6b4c895e86bedc82a",
    "pypi:pandas==2.2.3": "4f18ba62b61d7e192368b84517265a99b4d7ee8912f8708660fb4a366cc82667",
    "pypi:numpy==2.2.0": "140dd80ff8981a583a60980be1a655068f8adebf7a45a06a6858c873fcdcd4a0",
    "pypi:grpcio==1.68.1": "44a8502dd5de653ae6a73e2de50a401d84184f0331d0ac3daeb044e66d5c5054",
    "pypi:ruff==0.8.4": "0d5f89f254836799af1615798caa5f80b7f935d7a670fad66c5007928e57ace8",
    "pypi:uv==0.5.11": "6094ca4c5f917d58f884011416bb15066e222ef8d0494f26b0156ac97ad6810b",
    "pypi:polars==1.17.1": "5a3dac3cb7cbe174d1fa898cba9afbede0c08e8728feeeab515554d762127019",
    "npm:three@0.171.0": "56e45bcf3c6998e9cc91ade83e6dd711a2007694bafc108baf697c0039e454aa",
    "npm:@babylonjs/core@7.40.3": "c8cd4b66ddc30bf55c3e7ac7e429815e8e5daa85dd2166981ec5cd9eb4514367",
    "npm:date-fns@4.1.0": "90718290bbf34bf3d0c80bb70456e0069e0cc547caccaf1464fe42f1f602c460",
    "npm:typeorm@0.3.20": "12d63383bfa712607fce9fcc3025a1087a18aa7b44b1c26d0ec62bde0ce47501",
    "npm:aws-sdk@2.1692.0": "c5de2b2f968e2b039bc17466dcac07cdd554fd3f81614b722fdbaa2f29037287",
    "npm:@fluentui/react@8.122.3": "3411ac18308bc28215cd40e780af219e4e90808c0a8e67db168ab6b2cb8ac057",
    "debian:cargo=0.66.0+ds1-1": "a34dfd2d662a00e426351cde058d3bec039a6b751f7e9a31805e9fe000a98014",
    "debian:commons-math3=3.6.1-3": "16d940c11c48793214915b72201c35719acd1cb40278066b3c090165550fd992",
    "debian:golang-1.19=1.19.4-1": "eda74db4ac494800a3e66ee784e495bfbb9b8e535df924a8b01b1a8028b7f368",
    "debian:etcd=3.4.23-4": "055c608c4898d25f23aefbc845ff074bf5e8a07e61ed41dbd5cc4d4f59c93093",
    "debian:prometheus=2.42.0+ds-5+deb12u1": "62d510f128aac02f138d6fa839589bc4649f65cae3bd0917aeee033a8889af61",
    "debian:guava-libraries=31.1-1": "3dbb56b34e5ebd1b97184f72d31fbf9da24cc26c28f1ad3714aeeefdeedaed2a",
    "debian:libspring-java=4.3.30-2": "80b31da14c048f74a0ce0753092228eac751e33fe05bec5f251cdb3a7aed91ca",
    "debian:protobuf=3.21.12-3+deb12u1": "930c2c3b5ecc6c9c12615cf5ad93f1cd6e12d0aba862b572e076259970ac3a53",
}


def fetch_pinned(log: Callable[[str], None]) -> list[Path]:
    """The archives, from the cache or from their indexes."""
    found = []
    for word, expected in PINNED.items():
        try:
            paths = fetch(word)
        except DataError:
            raise
        except LakhError as error:
            log(f"{word} is left out: {error.found}")
            continue
        matching = [path for path in paths if storage.sha256(path) == expected]
        if not matching:
            raise DataError(word, "has a different hash than the pinned one", "do not compare with published figures")
        found += matching
    return found
