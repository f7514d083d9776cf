"""An unchanged pretraining script of Megatron-LM as a recipe."""

from liver_hpc.recipes.megatron_lm.recipe import Pretrain

__all__ = ["Pretrain"]
