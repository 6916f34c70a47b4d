"""The torch.distributed backend "c3": process group, tensors in registered memory, FSDP hooks and GPU staging."""
