"""800 connections of strangers to one address, kept open until stdin ends: `python stranger_flood.py HOST:PORT`.

A program of its own, because it imports neither numpy nor torch.
"""

import resource
import socket
import struct
import sys

HELLO = 0x6C633303


def main(address: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, _, port = address.rpartition(":")
    connections = []
    for number in range(800):
        connection = socket.create_connection((host, int(port)), timeout=20)
        connections.append(connection)
        try:
            connection.recv(20)
            connection.sendall(struct.pack("<Iiii", HELLO, 0, 0, 1) + number.to_bytes(16, "big") + bytes(48))
        except OSError:
            continue  # dropped among too many
    print("connected", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
