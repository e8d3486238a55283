"""Qwen3-VL-MoE as pure functions on plain tensors, and the modules that own its parameters."""
