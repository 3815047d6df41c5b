"""The bytes: KV tensors on the device, and their copies on the host and in storage. Knows slots, never requests."""
