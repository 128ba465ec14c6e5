"""Control messages round-trip with their arrays and refuse what they do not know; metrics are one object per line."""

from __future__ import annotations

import json
import socket
import threading

import msgspec
import numpy as np
import pytest

from penstock.ir.schedule import Action
from penstock.runtime.launch.options import RunOptions
from penstock.runtime.messages import control
from penstock.runtime.messages.control import Audit, Batch, Channel, Failed, LogEntry, RunCommand, Setup, Step
from penstock.runtime.messages.status import Status, StatusBoard, describe_line
from penstock.runtime.telemetry.metrics import Metrics, format_seconds
from penstock.support.errors import UsageError


def test_messages_and_arrays_round_trip():
    import ml_dtypes

    a, b = socket.socketpair()
    left, right = Channel(a), Channel(b)
    messages = [
        Setup("bundle", 60.0, control.DataSpec("x.npz", True, 3)),
        RunCommand(3),
        Step(4, 0.5, (0.25, 0.75), None, 12.5),
        Audit({"w": 2}, {"w": 2}, 99, (LogEntry(0, 1, "F", 2),)),
        Failed("PeerLost", "gone", "rank 0", ""),
    ]
    arrays = {
        "matrix": np.arange(6.0).reshape(2, 3),
        "turned": np.arange(6, dtype=np.int64).reshape(2, 3).T,
        "scalar": np.array(3, np.int32),
        "none": np.zeros((0, 4), np.float32),
        "big": np.random.default_rng(0).standard_normal(300_000),
        "half": np.array([1.5, 2.5], ml_dtypes.bfloat16),
    }
    thread = threading.Thread(
        target=lambda: [left.send(m) for m in messages] + [left.send(Batch(7), arrays), left.close()]
    )
    thread.start()
    for message in messages:
        assert right.receive() == (message, {})
    found, got = right.receive()
    assert found == Batch(7)
    assert got.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(got[name], array)
    assert right.receive() is None
    thread.join(10)
    right.close()


def test_unknown_messages_and_fields_are_refused():
    decode = msgspec.msgpack.Decoder(control.Message).decode
    good = {"type": "RunCommand", "first": 0, "batches": 2}
    assert decode(msgspec.msgpack.encode(good)) == RunCommand(0, 2)
    for bad in (good | {"more": 1}, {"type": "Format", "disk": "c"}, {"type": "RunCommand"}, good | {"first": "0"}):
        with pytest.raises(msgspec.ValidationError):
            decode(msgspec.msgpack.encode(bad))


def test_status_lines():
    board = StatusBoard(3)
    lines = [Status(board.descriptor, rank) for rank in range(3)]
    assert board.read(1) == ""
    lines[1].show(Action.parse("1SF4>2"))
    lines[2].show(None)
    assert [board.read(rank) for rank in range(3)] == ["", "1SF4>2", "idle"]
    assert describe_line(board.read(1)) == "1SF4>2 (send of microbatch 4 to rank 2)"
    assert describe_line("loading") == "loading"
    lines[1].show("saving")
    assert board.read(1) == "saving"
    board.close()


def test_metrics_after_a_resume_replace_the_steps_that_are_run_again(tmp_path, capsys):
    path = tmp_path / "sub" / "m.jsonl"

    def record(first, total, append):
        metrics = Metrics(path, 8, first, total, append=append)
        metrics.start()
        for step in range(first, total):
            metrics.add(Step(step, 1.0 / (step + 1), (1.0,), 0.1, metrics._started + step - first + 1))
        metrics.close()
        return metrics

    assert record(0, 5, False).samples_per_second == pytest.approx(8)
    with path.open("a") as file:
        file.write('{"step": 5, "lo')
    record(3, 6, True)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(6))
    assert records[0]["step_s"] == pytest.approx(1)
    record(0, 1, False)
    assert len(path.read_text().splitlines()) == 1
    metrics = Metrics(path, 8, 0, 1)
    metrics.start()
    metrics.add(Step(0, float("nan"), (1.0,), None, metrics._started + 1))
    metrics.close()
    # Strict JSON has no NaN.
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["loss"] == "nan"
    assert "step 6/6  loss 0.1667  8.0 samples/s  0s left" in capsys.readouterr().err


def test_one_run_at_a_time_writes_a_file_of_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.runtime.telemetry.metrics._HANDOVER_SECONDS", 0.3)
    path = tmp_path / "m.jsonl"
    first = Metrics(path, 8, 0, 9, progress=False)
    first.add(Step(0, 1.0, (1.0,), 0.1, 1.0))
    with pytest.raises(UsageError, match=r"m\.jsonl: another run writes its metrics there\n *hint: give each run"):
        Metrics(path, 8, 0, 9, progress=False)
    path.write_text("")  # emptied by something that knows no locks
    first.add(Step(1, 1.0, (1.0,), 0.1, 2.0))
    first.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]
    # The lock ends with its holder, also where the next one waits for it.
    first = Metrics(path, 8, 0, 9, progress=False)
    threading.Timer(0.1, first.close).start()
    Metrics(path, 8, 0, 9, progress=False).close()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (61, "1m01s"), (3600, "1h00m"), (90061, "25h01m")]
)
def test_times_for_people(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("steps", "every", "first", "chunks"),
    [(7, 3, 0, [3, 3, 1]), (7, None, 4, [7]), (4, 3, 2, [1, 3]), (4, 3, 3, [3, 1]), (2, 10, 0, [2]), (6, 3, 0, [3, 3])],
)
def test_checkpoints_fall_on_multiples_and_on_the_end(steps, every, first, chunks):
    options = RunOptions(bundle="b", steps=steps, checkpoint="ckpt", checkpoint_every=every)
    assert list(options.chunks(first, first + options.steps)) == chunks
