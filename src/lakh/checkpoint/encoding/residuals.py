"""Differences between float32 bit patterns and their prediction, as byte planes that an entropy coder can shorten.

Nearly all differences lie in a range much smaller than 2^32. They are shifted so that the highest byte spans just this
range: its table then describes their distribution in 256 steps. The bytes below it are noise and stored as they are,
the lowest one without the bits that the shift left empty. The few differences outside of the range are listed with
their places, and signs are a plane of their own.
"""

from __future__ import annotations

import numpy as np

from lakh.checkpoint.encoding.parts import compress, decompress

__all__ = ["NUM_PARTS", "cost_bits", "decode_residuals", "encode_residuals"]

NUM_PARTS = 7  # four planes, signs, places and values of the exceptions
SAMPLE = 1 << 14
OUTSIDE = (0.0, 0.0002, 0.002)  # of the differences on each side, to be listed
EXCEPTION_BITS = 56  # of one of them, compressed
RANDOM_BITS = 7.9  # entropy of a byte from which compressing is not worth its time
LOWEST = -(1 << 31)

Range = tuple[int, int]
"""The lowest difference, and the number of bits of the range above it."""


def encode_residuals(differences: np.ndarray, signs: np.ndarray | None) -> tuple[list[int], list[bytes]]:
    """(header, parts) of int32 `differences`; `signs`: one more bit each, 0 or 1, which costs nothing if all are 0."""
    lowest, bits = _choose_range(differences)[0]
    above = differences.view(np.uint32) - np.uint32(lowest & 0xFFFFFFFF)
    places = np.flatnonzero(above >> np.uint32(bits)) if bits < 32 else np.zeros(0, np.int64)
    values = differences[places]
    above[places] = 0
    above <<= np.uint32(32 - bits)
    planes = above.view(np.uint8).reshape(-1, 4)
    encoded = [_encode_plane(np.ascontiguousarray(planes[:, at]), _bits_in_plane(at, bits)) for at in range(4)]
    has_signs = signs is not None and bool(signs.any())
    encoded.append(_encode_plane(_packed(signs.astype(np.uint8) << 7, 1), 8) if has_signs else (True, b""))  # type: ignore[union-attr]
    stored = sum(is_stored << at for at, (is_stored, _) in enumerate(encoded))
    listed = [compress(np.diff(places, prepend=0).astype(np.uint32)), compress(values)] if len(places) else [b"", b""]
    return [lowest, bits, stored, len(places), int(has_signs)], [part for _, part in encoded] + listed


def decode_residuals(header: list[int], parts: list[memoryview], count: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The differences, and the signs, None if all are 0."""
    lowest, bits, stored, num_places, has_signs = header
    if not 8 <= bits <= 32:
        raise ValueError(f"has a range of {bits} bits")
    planes = np.empty((count, 4), np.uint8)
    for at in range(4):
        planes[:, at] = _decode_plane(parts[at], bool(stored >> at & 1), _bits_in_plane(at, bits), count)
    above = planes.view(np.uint32).reshape(-1)
    above >>= np.uint32(32 - bits)
    differences = (above + np.uint32(lowest & 0xFFFFFFFF)).view(np.int32)
    if num_places:
        places = np.frombuffer(decompress(parts[5], 4 * num_places), np.uint32).cumsum(dtype=np.int64)
        differences[places] = np.frombuffer(decompress(parts[6], 4 * num_places), np.int32)
    if not has_signs:
        return differences, None
    packed = _decode_plane(parts[4], bool(stored >> 4 & 1), 8, -(-count // 8))
    return differences, (_unpacked(packed, 1, count) >> 7).astype(np.uint32)


def cost_bits(differences: np.ndarray, signs: np.ndarray | None) -> float:
    """About the number of bits that all these differences take."""
    cost = _choose_range(differences)[1]
    if signs is not None:
        cost += _entropy(_sample(signs))
    return cost * len(differences)


def _choose_range(differences: np.ndarray) -> tuple[Range, float]:
    """The cheapest range, and its bits per difference."""
    if not len(differences):
        return (0, 8), 0.0
    ordered = np.sort(_sample(differences)).astype(np.int64)
    found: list[tuple[float, Range]] = []
    for share in OUTSIDE:
        first = int(share * len(ordered))
        lowest, highest = int(ordered[first]), int(ordered[len(ordered) - 1 - first])
        bits = max(8, (highest - lowest).bit_length())
        above = ordered - lowest
        inside = above[(above >= 0) & (above < 1 << bits)]
        entropy = max(1.0, _entropy((inside >> (bits - 8)).astype(np.uint8)))  # no code is shorter than a bit
        outside = 1 - len(inside) / len(ordered)
        found.append((entropy + bits - 8 + EXCEPTION_BITS * outside, (lowest, bits)))
    cost, chosen = min(found)
    return chosen, cost


# --- planes -------------------------------------------------------------------------------------------------------


def _bits_in_plane(at: int, bits: int) -> int:
    """How many of the highest bits of a byte are used, in numbers of `bits` that are shifted to the top of 32."""
    return min(8, max(0, bits - 8 * (3 - at)))


def _encode_plane(plane: np.ndarray, used: int) -> tuple[bool, bytes]:
    """(stored as it is, bytes)."""
    if used < 8:
        return True, _packed(plane, used).tobytes()
    if len(plane) and _entropy(_sample(plane)) <= RANDOM_BITS:
        part = compress(plane)
        if len(part) < len(plane):
            return False, part
    return True, plane.tobytes()


def _decode_plane(part: memoryview, is_stored: bool, used: int, count: int) -> np.ndarray:
    plane = np.frombuffer(part if is_stored else decompress(part, count), np.uint8)
    return _unpacked(plane, used, count) if used < 8 else plane


def _packed(plane: np.ndarray, used: int) -> np.ndarray:
    """The highest `used` bits of each byte, eight of one significance in a byte."""
    return np.concatenate([np.packbits(plane & (128 >> at)) for at in range(used)] or [np.zeros(0, np.uint8)])


def _unpacked(packed: np.ndarray, used: int, count: int) -> np.ndarray:
    plane = np.zeros(count, np.uint8)
    for at, one in enumerate(packed.reshape(used, -1) if used else ()):
        plane |= np.unpackbits(one, count=count) << np.uint8(7 - at)
    return plane


def _sample(values: np.ndarray) -> np.ndarray:
    return values[:: (len(values) // SAMPLE) | 1]


def _entropy(values: np.ndarray) -> float:
    """Bits per number."""
    counts = np.bincount(values, minlength=1)
    shares = counts[counts > 0] / max(1, len(values))
    return float(-(shares * np.log2(shares)).sum())
