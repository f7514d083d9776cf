"""What becomes of each option of Megatron-LM, 0.16 to 0.19 and main, in a run that is elastic.

An option is named as its destination in the parser, or as a pattern of such; `name=a|b` are the
values that can be had. An exact name beats a pattern, an earlier pattern a later one. Of those that
no table names, keys of the run file follow from what `owned.py` names; the rest is refused too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Options of which the same is to be said. instead: what to do, where there is something."""

    why: str
    names: str
    instead: str = ""


LAYOUT = Group(
    "the run's `layouts` decide",
    """tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    expert_model_parallel_size expert_tensor_parallel_size sequence_parallel
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
    microbatch_group_size_per_v* pipeline_model_parallel_layout
    pipeline_model_parallel_comm_backend decoder_first_pipeline_num_layers
    decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split overlap_p2p_comm overlap_p2p_communication
    use_distributed_optimizer distributed_backend use_tp_pp_dp_mapping""",
)
"""Taken out of the words before the script is run; each layout gives its own."""

NO_EFFECT = (
    Group(
        "the run's journal, `liver status` and `liver report` tell what happens",
        """log_* timing_log_* tensorboard_* wandb_* *one_logger* app_tag_* otel_* logging_level
        barrier_with_* config_logger_dir moe_per_layer_logging moe_routing_trace_*
        dump_param_to_param_group_map profile profile_* use_pytorch_profiler pytorch_profiler_*
        record_memory_history memory_snapshot_path record_shapes nvtx_ranges flight_recorder_*
        straggler_* disable_straggler_on_startup run_workload_inspector_server test_mode""",
    ),
    Group(
        "the runtime watches workers and their state, and ends a job in time, in its own way",
        """exit_duration_in_mins exit_signal exit_signal_handler*
        adlr_autoresume* *ft_package calc_ft_timeouts ft_num_warmup_iters rerun_mode
        check_for_spiky_loss check_for_large_grads gpu_sniff_test_interval
        check_weight_hash_across_dp_replicas_interval distributed_timeout_*""",
    ),
    Group(
        "how a checkpoint is written is the runtime's matter",
        """async_save async_strategy async_ckpt_* use_persistent_ckpt_worker
        ckpt_fully_parallel_* ckpt_assume_constant_structure dist_ckpt_strictness
        dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient
        dist_ckpt_workers dist_ckpt_format* use_dist_ckpt* verify_integrity
        auto_detect_ckpt_format ckpt_load_validate_sharding_integrity ckpt_pg_tensors_cache_*
        save_tokenizer_assets ckpt_drop_redundant_extra_state stream_ckpt_dequant
        use_tokenizer_model_from_checkpoint_args""",
    ),
    Group(
        "random numbers are functions of the step, not state",
        """no_save_rng no_load_rng te_rng_tracker inference_rng_tracker""",
    ),
    Group(
        "groups, buffers and streams are the runtime's",
        """use_gloo_process_groups enable_gloo_process_groups gloo_process_groups lazy_mpu_init
        local_rank high_priority_stream_groups nccl_communicator_config_path nccl_ub use_nccl_ub
        disable_symmetric_registration use_sharp sharp_enabled_group
        create_all_gather_group ddp_pad_buckets_for_high_nccl_busbw ddp_average_in_collective
        align_grad_reduce align_param_gather
        scatter_gather_tensors_in_pipeline async_tensor_model_parallel_allreduce
        use_layer_wise_param_layout""",
    ),
    Group(
        "memory and interpreter are left alone",
        """manual_gc manual_gc_* empty_unused_memory_level train_sync_interval
        disable_jit_fuser""",
    ),
    Group(
        "one thread of each worker reads samples, `train.read_ahead` micro-batches ahead",
        "num_workers",
    ),
    Group(
        "loss scales are of fp16", "initial_loss_scale min_loss_scale loss_scale_window hysteresis"
    ),
    Group(
        "a checkpoint with another schedule than the arguments' is refused",
        "use_checkpoint_opt_param_scheduler",
    ),
    Group("it is always so", "use_mcore_models deprecated_use_mcore_models"),
)

PASSED = (
    Group(
        "the model's architecture",
        """num_layers encoder_num_layers hidden_size ffn_hidden_size num_attention_heads
        kv_channels group_query_attention num_query_groups max_position_embeddings seq_length
        position_embedding_type relative_attention_* rotary_* use_rotary_*
        use_rope_scaling rope_* no_rope_freq yarn_* add_position_embedding
        normalization layernorm_epsilon norm_epsilon apply_layernorm_1p
        layernorm_zero_centered_gamma add_bias_linear add_qkv_bias swiglu squared_relu openai_gelu
        quick_geglu glu_linear_offset activation_func_clamp_value onnx_safe bert_binary_head
        untie_embeddings_and_output_weights apply_residual_connection_post_layernorm
        qk_layernorm qk_l2_norm attention_output_gate softmax_type window_size
        window_attn_skip_freq multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim
        qk_pos_emb_head_dim v_head_dim mscale mscale_all_dim
        init_method_std embedding_init_method_std init_method_xavier_uniform
        perform_initialization use_cpu_initialization spec enable_experimental
        mtp_num_layers mtp_loss_scaling_factor""",
    ),
    Group(
        "how it is computed",
        """bf16 attention_backend use_flash_attn
        flash_attention_version attention_softmax_in_fp32 apply_query_key_layer_scaling
        fp32_residual_connection masked_softmax_fusion bias_gelu_fusion bias_swiglu_fusion
        bias_dropout_fusion apply_rope_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl
        no_persist_layer_norm gradient_accumulation_fusion accumulate_allreduce_grads_in_fp32
        use_fused_weighted_squared_relu fused_residual_rmsnorm use_te_activation_func
        clone_scatter_output_in_embedding deterministic_mode check_for_nan_in_loss_and_grad
        logit_dtype output_logit_dtype calculate_per_token_loss
        recompute_granularity recompute_method recompute_num_layers recompute_modules
        recompute_activations hidden_dropout attention_dropout""",
    ),
    Group(
        "experts",
        """num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size
        moe_shared_expert_gate moe_shared_expert_overlap moe_router_topk moe_router_num_groups
        moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor
        moe_router_score_function moe_router_dtype moe_router_enable_expert_bias
        moe_router_bias_update_rate moe_router_force_load_balancing
        moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy
        moe_layer_recompute moe_permute_fusion moe_router_fusion moe_apply_probs_on_input
        moe_grouped_gemm
        moe_latent_size""",
    ),
    Group(
        "tokenizer and data",
        """tokenizer_* vocab_size padded_vocab_size vocab_file merge_file vocab_extra_ids
        make_vocab_size_divisible_by pad_vocab_size legacy_tokenizer tiktoken_* trust_remote_code
        metadata_path special_tokens null_tokenizer_* chat_template use_gigatoken
        data_cache_path mmap_bin_files num_dataset_builder_threads object_storage_cache_path
        mid_level_dataset_surplus per_dataset_sequences_path dataloader_fast_cache_load
        dataloader_defer_npy_index_mmap allow_ambiguous_pad_tokens reset_position_ids
        eod_mask_loss create_attention_mask_in_dataloader enable_msc
        disable_msc* msc sft_tokenizer_prompt_format""",
    ),
    Group("a checkpoint of another schedule is loaded with it", "override_opt_param_scheduler"),
)
"""What the script gets as it stands; what the model cannot have in a layout is told when it is
built (`world/refused.py`)."""

_UNTRIED = "it was not tried with a live handoff"

REFUSED = (
    Group("a loss scale runs on across steps, and is not moved",
          "fp16 fp16_lm_cross_entropy loss_scale", "--bf16, which needs none"),
    Group("its scales run on across steps in state that is not moved",
          """fp8* fp4* first_last_layers_bf16 num_layers_at_start_in_bf16
          num_layers_at_end_in_bf16 reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache
          te_precision_config_file moe_router_padding_for_* moe_dispatch_fwd_dtype
          moe_combine_bwd_dtype use_kitchen_attention kitchen_attention_backend""", "--bf16"),
    Group("the global batch of a step is the same in every layout, and grows linearly alone",
          """decrease_batch_size_if_needed step_batch_size_schedule
          phase_transition_iterations iterations_to_skip result_rejected_tracker_filename""",
          "--rampup-batch-size, which megatron-core has before 0.18"),
    Group("parameters are sharded in another way than handoffs move them",
          """*fsdp*
          data_parallel_sharding_strategy outer_dp_sharding_strategy gradient_reduce_div_fusion
          suggested_communication_unit_size enable_full_sharding_in_hsdp""",
          "leave it out: the distributed optimizer shards the optimizer's state"),
    Group("the distributed optimizer spans all data-parallel workers",
          "num_distributed_optimizer_instances=1", "leave it out"),
    Group("weights that are sharded along a further axis are no layout that a run can have",
          """tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards
          gtp_*"""),
    Group("the runtime moves Adam's state, and no other optimizer's",
          "optimizer=adam sgd_momentum muon_* lion_*", "--optimizer adam"),
    Group("the optimizer's state is fp32",
          """use_precision_aware_optimizer main_grads_dtype=fp32|torch.float32
          main_params_dtype=fp32|torch.float32 exp_avg_dtype=fp32|torch.float32
          exp_avg_sq_dtype=fp32|torch.float32""", "leave it out"),
    Group("gradients are added up and reduced in one precision",
          """ddp_param_name_patterns_for_fp32_local_accumulation
          ddp_reduce_scatter_with_fp32_accumulation""", "leave it out"),
    Group("state that is moved lies on the device",
          """optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload
          overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params cpu_offloading_*
          fine_grained_* offload_modules min_offloaded_tensor_size delay_offload_*
          delta_offload_* activation_offload_fraction moe_paged_stash*""", "recompute activations"),
    Group("all have one learning rate, but embeddings and output layer, and one weight decay",
          """head_lr_mult use_mup mup_* apply_wd_to_qk_layernorm no_weight_decay_cond_type
          freeze_all_layers"""),
    Group("the runtime's schedule has none",
          "lr_decay_style=constant|linear|cosine|WSD", "constant, linear, cosine and WSD decay"),
    Group("weight decay is the same at every step",
          "weight_decay_incr_style=constant start_weight_decay end_weight_decay",
          "--weight-decay"),
    Group("the weights are changed after the optimizer's step", "qk_clip qk_clip_*"),
    Group("its weight is two tensors of a checkpoint, as which a handoff does not know it",
          "mla_down_proj_fusion", "leave it out"),
    Group("parameters have memory before they get their first values",
          "init_model_with_meta_device", "leave it out"),
    Group("a CUDA graph replays the memory and groups of one world",
          """*cuda_graph* optimizer_cuda_graph""", "leave it out"),
    Group("the runtime restarts workers itself", "inprocess_*", "leave it out"),
    Group("faults are injected by Megatron's own loop", "fault_injector_* error_injection_*"),
    Group("samples of several documents have lengths of their own",
          """sft dataloader_inter_document_masking hybrid_context_parallel
          max_seqlen_per_dp_cp_rank"""),
    Group("groups of context parallelism are of one level",
          "hierarchical_context_parallel_sizes cp_comm_type=p2p|all_gather|a2a"),
    Group("samples come in the order of Megatron's single loader, whatever the layout",
          "dataloader_type=single data_sharding", "--dataloader-type single"),
    Group("its draws depend on which samples one worker has read", "fim_*"),
    Group("workers of one layout would begin with different values", "data_parallel_random_init"),
    Group("a run begins with a whole checkpoint of the job, or, by --finetune, with its weights",
          "no_save_optim load_main_params_from_ckpt ckpt_step override_ckpt_iteration"),
    Group("arguments are what model.args says",
          "use_checkpoint_args use_mp_args_from_checkpoint_args",
          "write the checkpoint's arguments out"),
    Group("checkpoints are of the format torch_dist",
          "ckpt_format=torch_dist dist_ckpt_save_pre_mcore_014 ckpt_convert_*",
          "--ckpt-format torch_dist"),
    Group("checkpoint.every_steps and checkpoint.keep of the run file say which stay",
          "save_retain_interval non_persistent_* replication replication_*"),
    Group("Megatron's own loop writes it",
          """save_wgrads_interval save_dgrads_interval save_params_interval
          save_activations_interval save_tokens_per_expert_interval logits_*"""),
    Group("validation takes eval-iters global batches of one validation set",
          """full_validation multiple_validation_sets validation_set_names start_eval_at_iter
          eval_global_batch_size eval_micro_batch_size"""),
    Group("a run trains to its end", "skip_train", "leave it out"),
    Group("model.args is where arguments are", "yaml_cfg"),
    Group("it is of another kind of training",
          """perform_rl_step rl_* grpo_* langrl_* refit_method
          inference_* nccl_all_reduce_for_prefill max_tokens_to_oom output_bert_embeddings
          bert_embedder_type use_legacy_static_engine decode_only_cuda_graphs
          *chunked_prefill num_speculative_tokens offset_sampling_seed_by_dp_rank
          use_same_sampling_seed_across_dp_ranks flash_decode symmetric_ar_type
          mlp_chunks_for_prefill cache_mla_latents fake_process_group
          ict_* biencoder_* bert_load titles_data_path query_in_block_prob use_one_sent_docs
          evidence_data_path retriever_* block_data_path embedding_path indexer_*
          num_classes img_h img_w num_channels patch_dim classes_fraction
          data_per_class_fraction vision_* swin_* mask_type mask_factor iter_per_epoch dino_*
          decoder_num_layers decoder_seq_length mask_prob short_seq_prob sample_rate
          mrope_section transformer_impl=local|transformer_engine""",
          "decoder-only pretraining is what is supported"),
    Group("the model is Megatron core's", "use_legacy_models"),
    Group("ModelOpt wraps the model, which a run does not",
          "modelopt_enabled export_kd_teacher_load", "leave it out"),
    Group("it is another name of an option", "encoder_seq_length", "--seq-length"),
    Group("Megatron itself takes it no more",
          "batch_size warmup model_parallel_size checkpoint_activations moe_extended_tp"),
    Group("its buffers and groups are made once a process, for one layout",
          """tp_comm_* moe_token_dispatcher_type=allgather|alltoall moe_enable_deepep
          moe_deepep_* moe_flex_* moe_hybridep_* moe_ncclep_*
          moe_permute_fusion_into_hybridep use_ring_exchange_p2p distribute_saved_activations"""),
    Group("its schedule computes micro-batches in a way that depends on the layout",
          """overlap_moe_expert_parallel_comm delay_wgrad_compute
          ep_overlap_early_attn_memory_release overlap_dispatch_backward_with_experts_wgrad
          high_priority_a2a_comm_stream defer_embedding_wgrad_compute wgrad_deferral_limit
          overlap_p2p_comm_warmup_flush overlap_p2p_communication_warmup_flush
          overlap_param_gather_with_optimizer_step ddp_num_buckets""", "--ddp-bucket-size"),
    Group("it sets up the whole process, in which two worlds live",
          "batch_invariant_* disable_bf16_reduced_precision_matmul"),
    Group("which tokens an expert gets depends on what lies on one worker, and so on the layout",
          """moe_router_load_balancing_type=aux_loss|seq_aux_loss|none
          moe_expert_rank_capacity_factor moe_router_quantile_balancing_ema
          moe_router_force_biased moe_enable_routing_replay moe_use_upcycling
          moe_upcycling_granularity"""),
    Group("chunks in the middle of a pipeline are given no mask, and not every kernel heeds one",
          "reset_attention_mask", "leave it out"),
    Group(_UNTRIED,
          """is_hybrid_model hybrid_* mamba_* mtp_hybrid_override_pattern
          mtp_use_repeated_layer mtp_detach_heads mtp_hsm mtp_standalone use_mamba_mem_eff_path
          mamba_mem_eff_path experimental_attention_variant dsa_* linear_* gdp_* mhc_*
          enable_mhc_connections heterogeneous_layers_* use_transformer_engine_op_fuser
          use_grouped_gemm_for_* mlp_chunks_for_training moe_single_grouped_*
          moe_use_grouped_tensor moe_use_legacy_grouped_gemm moe_mlp_glu_interleave_size
          moe_shared_expert_glu_interleave_size"""),
)  # fmt: skip
"""Refused by name, and why."""
