"""Decoders that many threads first need at once."""

import subprocess
import sys

PROGRAM = """
import sys, threading
from msgspec import Struct
from asyncflow.rpc import framing

sys.setswitchinterval(1e-6)

def need(begin, kind, encoded):
    begin.wait()
    framing.decoder_of(kind).decode(encoded)

for _ in range(200):
    class Inner(Struct):
        x: int
        y: list[int] | None = None

    class Outer(Struct):
        many: list[Inner]
        named: dict[str, Inner]
        one: Inner

    inner = Inner(1, [2])
    encoded = framing.encode(Outer([inner], {"a": inner}, inner))
    begin = threading.Barrier(8)
    threads = [threading.Thread(target=need, args=(begin, Outer, encoded)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_many_threads_may_need_a_decoder_at_once():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
