"""What `pretrain` is given to build the model with."""


def model_provider(
    model_builder, pre_process=True, post_process=True, vp_stage=None, config=None, **groups
):
    from megatron.training import get_args

    return model_builder(get_args(), pre_process, post_process, vp_stage, config=config, **groups)
