"""Cost of a training run: prices of a GPU-hour, achieved rate, GPUs and days, reserves."""
