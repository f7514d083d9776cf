"""An unchanged script of Megatron-LM: plainly by torchrun, and elastically."""
