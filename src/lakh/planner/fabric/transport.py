"""What a transport makes of a path's rate: retransmission after loss, and the cap on bytes in flight.

go-back-n         a lost packet discards everything in flight behind it: W packets, W = rate x round trip / MTU
selective-repeat  only the lost packet is sent again
erasure-coding    a fixed share of parity packets, nothing sent again while losses stay below it

Receiver-driven admission (the receiver grants buffers) limits the bytes in flight, and so the rate over distance.
"""

from __future__ import annotations

from lakh.errors import UserError
from lakh.planner.stacked import Array

__all__ = ["MTU_BYTES", "TRANSPORTS", "admission_Bps", "goodput_share"]

TRANSPORTS = ("go-back-n", "selective-repeat", "erasure-coding")
MTU_BYTES = 4096.0
PARITY_SHARE = 0.1
"""Parity packets of erasure coding: one in ten."""


def goodput_share(transport: str, loss: float, rate_Bps: Array, round_trip_s: Array) -> Array:
    """Share of the rate that is new data when a packet is lost with probability `loss`."""
    if transport == "erasure-coding":
        if loss >= PARITY_SHARE:
            found = f"{loss:g} is not below the {PARITY_SHARE:.0%} of parity packets"
            raise UserError("loss", found, "choose selective-repeat")
        return 1 - PARITY_SHARE + 0.0 * rate_Bps
    if transport == "selective-repeat":
        return 1 - loss + 0.0 * rate_Bps
    in_flight = 1 + rate_Bps * round_trip_s / MTU_BYTES
    return (1 - loss) / (1 - loss + loss * in_flight)


def admission_Bps(in_flight_bytes: float, round_trip_s: Array) -> Array:
    """Rate of a connection whose receiver grants at most `in_flight_bytes`."""
    return in_flight_bytes / round_trip_s
