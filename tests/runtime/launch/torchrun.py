"""A run under torchrun: its processes become the ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

SCRIPT = """
import json, sys
from penstock.support.errors import PenstockError
from penstock.runtime.job.run import run_bundle
options = json.loads(sys.argv[1])
try:
    run_bundle(**options)
except PenstockError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""

# As `python -m torch.distributed.run`, but without garbage among what it imports and without taking that apart.
TORCHRUN = """
import gc, os, sys
gc.disable()
from torch.distributed.run import main
main()
sys.stdout.flush()
os._exit(0)
"""


def torchrun(tmp_path, processes, seconds=90, **options):
    """torchrun with our processes; the return code and what they said."""
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-c",
        TORCHRUN,
        "--nnodes=1",
        f"--nproc-per-node={processes}",
        "--master-addr=127.0.0.1",
        "--master-port=0",
    ]
    command += [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        str(script),
        json.dumps(options),
    ]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        try:
            code = process.wait(seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        return code, log.read()
