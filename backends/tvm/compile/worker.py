"""A process that compiles: `python -m penstock.backends.tvm.compile.worker`. Jobs come in on standard input, answers
go out on standard output.

It ends when its input ends, so it never outlives the process that started it by more than one job. TVM loads torch
where it finds it, for tensors that this process has none of: without torch, a worker starts in a third of the time.
"""

from __future__ import annotations

import os
import sys

from penstock.backends.tvm.fingerprint import source_fingerprint


def main() -> None:
    """Run jobs until the input ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # text that libraries print must not mix with the answers
    sys.modules["torch"] = None  # type: ignore[assignment]
    import msgspec

    from penstock.backends.tvm.messages import CompilerHello, Job  # lazy: heavy

    try:
        from .jobs import do  # lazy: heavy
    except Exception as error:
        if os.environ.get("PENSTOCK_TRACEBACK"):
            raise
        # TVM fails in many ways where memory is short; the process that waits for this one reports what happened.
        sys.exit(f"TVM cannot be loaded: {type(error).__name__}: {error}")

    def say(answer: msgspec.Struct) -> None:
        out.write(msgspec.json.encode(answer) + b"\n")
        out.flush()

    jobs = msgspec.json.Decoder(Job)
    try:
        say(CompilerHello(source_fingerprint()))
        for line in sys.stdin.buffer:
            say(do(jobs.decode(line)))
    except BrokenPipeError:
        # The process that waited for the answer has ended; leave the interpreter nothing to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


if __name__ == "__main__":
    main()
