"""The figures that are told of, by benchmark, and what each of them says; of the variants of a
sweep its table tells."""

_COSTS = {
    "cost_over_restart_median": "what a handoff costs in all, lost time and slowdown of the steps "
    "beside it, over a restart's lost time",
    "cost_over_restart_max": "the same, worst transition",
}

_RATIOS = {
    "speedup_min": "lost time of a restart over that of a handoff: least transition",
    "speedup_median": "the same, median",
    "existing_speedup_min": "the same where the checkpoint exists already, so saving is free",
    **_COSTS,
    "reconfiguration_over_restart_median": "notice to first step, of a handoff over a restart; "
    "training goes on meanwhile in the first and stands in the second",
    "reconfiguration_over_restart_max": "the same, worst transition",
}

FIGURES: dict[str, dict[str, str]] = {
    "reconfigure": {
        **_RATIOS,
        "lost_steps_max_25m": "largest median lost time of a handoff in steps, 25M parameters",
        "lost_steps_max_100m": "the same, 100M parameters",
    },
    "reconfigure-gpu": {name: f"{words}; on GPUs" for name, words in _RATIOS.items()},
    "reconfigure-slurm": {name: f"{words}; on a cluster" for name, words in _RATIOS.items()},
    "reconfigure-apart": {
        **{name: f"{words}, a core for each worker" for name, words in _COSTS.items()},
        "lost_steps_max_25m": "largest median lost time of a handoff in steps, 25M parameters, a "
        "core for each worker",
        "lost_steps_max_100m": "the same, 100M parameters, a core for each worker",
    },
    "reconfigure-warm": {
        "warm_speedup_min": "lost time of a restart from processes that had imported everything, "
        "over that of a handoff: least transition",
        "warm_speedup_median": "the same, median",
    },
    "reconfigure-sizes": {
        "live_lost_s_fixed": "lost time of a handoff of no bytes, by the line through all sizes, s",
        "live_lost_s_per_gb": "and what each gigabyte (10^9) that moves adds, s",
        "live_lost_explained": "share of the variance that the line explains",
        "restart_lost_s_fixed": "the same of a restart: with a checkpoint of no bytes, s",
        "restart_lost_s_per_gb": "for each gigabyte of its checkpoint, s",
        "restart_lost_explained": "share of the variance that the line explains",
    },
    "steady_state": {
        "overhead_percent": "step time of an undisturbed run over a plain Megatron loop's",
        "cpu_overhead_percent": "the same in CPU seconds of all processes",
        "interference_steps": "steps that a handoff takes by slowing those beside it; nobody joins",
        "cost_steps": "the same with its lost time",
        "join_interference_steps": "steps that it takes where a worker joins",
        "join_cost_steps": "the same with its lost time",
    },
    "handoffs": {
        "memory_growth_percent": "of all of a run's processes, over twenty handoffs in a row and "
        "over fifty replacements; the larger growth",
        "descriptors_growth": "the same of descriptors",
        "threads_growth": "of threads",
        "processes_growth": "of processes",
        "processes_left": "processes after its end",
    },
    "recovery": {
        "detection_s": "longest time until a lost worker or node is missed, s",
        "detection_killed_s": "of those that were killed",
        "detection_silent_s": "of those that stood still, heartbeat_s 2",
        "recovery_s": "what a loss takes of training, from memory, redone steps included; worst of "
        "all cases, s",
        "recovery_over_restart": "that over a restart from the same boundary's checkpoint; worst "
        "case",
        "bare_over_restart": "the same, less a step of a run without snapshots",
        "steps_rolled_back_max": "most steps done again, snapshots every step",
        "max_relative_difference": "of losses after it, against undisturbed runs (fp32)",
        "copies_overhead_percent": "CPU seconds of a run that takes snapshots, interval auto, over "
        "those of one without, 25M parameters, 8,192 tokens a step",
        "copies_every_steps": "and the interval that was chosen, steps",
        "processes_left": "processes after a run's end",
    },
    "soak": {
        "events": "grants, warnings, deaths and stalls that befell one run at random",
        "wrong_digests": "handoffs that were completed without equal digests",
        "hangs": "times at which no step was done for a minute",
        "lost_steps_beyond_copies": "steps done again, less one for each loss",
        "recoveries": "worlds that were filled from memory",
        "restarts_from_disk": "times at which the run began again from its checkpoint",
        "worker_memory_growth_percent": "memory of a worker that was there all the time, from the "
        "fiftieth event on",
        "worker_descriptors_more": "its descriptors",
        "loss_difference_over_another_layout": "largest difference of a step's loss to an "
        "undisturbed run's, over that of an undisturbed run in another layout (fp32)",
        "processes_left": "processes after the run's end",
        "minutes": "all of it, undisturbed runs included",
    },
    "script": {
        "throughput_ratio": "an unchanged Megatron-LM script: CPU seconds a token by torchrun over "
        "those of the elastic run between handoffs, of the processes that train",
        "throughput_ratio_all": "the same with torchrun, coordinator and agent",
        "max_relative_difference": "of its losses and gradient norms, one against the other, from "
        "one checkpoint (fp32)",
    },
    "stream": {
        "link_share": "TRANSFER's speed, without digests, over that of the raw link between the "
        "same processes",
        "link_share_digested": "the same with digests of all that moves, at both ends",
        "memory_over_budget": "peak extra memory over the staging budget",
        "bytes_over_bound": "bytes sent over the least that the placement allows",
    },
    "memory": {
        "handoff_peak_over_max_world": "a worker's most resident bytes during a handoff of 100M "
        "parameters in bounded memory over those of the larger of its two worlds, both above a "
        "booted worker's",
        "handoff_peak_over_max_world_both": "the same where both worlds are held",
    },
    "control": {
        "handoff_control_s": "control path of a handoff of 4,096 workers on 512 nodes that answer "
        "at once, s",
        "handoff_control_cpu_s": "CPU time of the coordinator in it, s",
        "coordinator_sockets": "connections to the coordinator, over the number of agents",
        "growth_1024_to_4096": "time for 4,096 workers over that for 1,024",
    },
    "planner": {
        "plan_s_1024": "seconds in which one worker of 1,024 plans a handoff of a 405B model",
        "plan_s_16384": "the same of 16,384",
        "growth_1024_to_16384": "the second over the first",
        "resolve_layouts_s_4096": "seconds that `layouts: auto` takes for 4,096 workers",
        "place_s_4096": "seconds in which the coordinator seats them",
        "bytes_between_nodes_over_exact": "as placed over the least, worst of 60 small handoffs",
        "derive_405b_s": "seconds in which a 405B model's spec is derived from the model itself",
        "derive_405b_bytes": "and the memory that it takes",
        "megatron_over_ours_1024": "time of Megatron's own planner over ours, same rank map",
    },
    "goodput": {
        "goodput_live": "share of time in which training made progress, events every few seconds",
        "goodput_restart": "the same job and events, stopped and restarted",
        "goodput_live_day": "a day of 47 events under the measured costs",
        "goodput_restart_day": "the same, restarted",
    },
    "convergence": {
        "max_relative_loss_difference": "loss of a run with many handoffs against a fixed run's",
        "control_max_relative_loss_difference": "of a fixed run in another layout: what the order "
        "of summation alone makes",
    },
    "transitions": {
        "transitions": "from a layout to another one, each with a model and batch",
        "bit_equal": "of them, those after which every bit is where it belongs, there and back",
        "max_relative_difference": "fp32: a loss or gradient norm of the ten steps after one, "
        "against those of the run that stayed",
        "max_relative_difference_bf16": "the same in bf16",
    },
    "simulate": {
        "model_error_median": "relative error of the model against handoffs left out of it",
        "simulated_pause_s_1024": "simulated pause of a 405B model's handoff, 1,024 workers",
        "simulated_pause_s_65536": "the same, 65,536 workers",
    },
    "uneven": {
        "throughput_7_of_8": "tokens a second of 7 workers over those of 8, modelled from measured "
        "steps; 128 micro-batches in the global batch",
        "throughput_4_of_8": "the same of falling back to 4",
        "uneven_over_model": "measured steps of uneven worlds over what the model says of them",
    },
    "peers": {
        "live_join_lost_s": "lost time of a live join in data parallelism, 1 to 2 workers, s",
        "torchrun_join_lost_s": "the same by torchrun elastic, state on disk",
        "torchft_join_lost_s": "the same by torchft",
        "live_leave_lost_s": "lost time of a live leave, 2 to 1 workers, s",
        "torchrun_leave_lost_s": "the same by torchrun elastic",
        "torchft_leave_lost_s": "the same by torchft",
        "inprocess_leave_lost_s": "a rank killed without warning, nvidia-resiliency-ext in process",
        "refit_dp2_to_tp2_over_transfer": "Megatron's refit over our TRANSFER, parameters alone",
        "refit_tp2_to_dp2_over_transfer": "the same, the other way",
    },
}
