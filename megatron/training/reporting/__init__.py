"""What a run tells while it goes on: log lines, TensorBoard, timers, profiles, norms, throughput."""
