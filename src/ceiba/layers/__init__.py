"""The parts models are composed of. They know tensors, shards and quantization methods, never models or requests."""
