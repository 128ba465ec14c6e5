"""The runtime of bundles: processes that hold stages, messages between them, their data, checkpoints and telemetry."""
