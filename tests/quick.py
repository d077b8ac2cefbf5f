"""`pytest --quick`, which `make test` is: of large families of tests, every n-th member.

A family is one law or one comparison with many operators, layouts or models. Its members fail
together far more often than alone. Without `--quick` all of them run, as `make thorough` does every
night.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

EVERY = {
    "distributed/test_context_and_experts.py::test_experts_on_many_ranks_are_those_of_a_loop": 3,
    "distributed/test_context_and_experts.py::test_ranks_with_parts_of_the_positions_equal_one_with_all": 3,
    "distributed/test_distributed.py::test_n_ranks_equal_one": 3,
    "distributed/test_distributed.py::test_sharding_and_rounding_commute_where_each_row_has_a_scale_of_its_own": 3,
    "distributed/test_elastic.py::test_a_run_that_loses_a_rank_goes_on": 0,
    "distributed/test_one_rank.py::test_laws_of_rewrites": 3,
    "distributed/test_one_rank.py::test_parameters_of_any_dtype_and_shape": 3,
    "distributed/test_pipeline.py::test_a_pipeline_equals_the_loop_over_micro_batches": 3,
    "distributed/test_pipeline.py::test_what_a_schedule_promises": 3,
    "distributed/test_shares.py::test_nothing_is_gathered_between_a_column_and_a_row": 3,
    "distributed/test_simulated_meshes.py::test_gradients_of_each_example": 3,
    "distributed/test_simulated_meshes.py::test_products_in_chunks_equal_the_uncut_ones": 3,
    "distributed/test_simulated_meshes.py::test_ranks_that_share_a_batch_equal_one": 0,
    "executors/test_codes.py::test_integers_lose_what_floats_do": 3,
    "executors/test_codes.py::test_kernels_compute_what_the_composites_mean": 4,
    "executors/test_codes.py::test_kernels_for_any_processor": 3,
    "executors/test_codes.py::test_training_keeps_no_decoded_weight": 3,
    "executors/test_codes.py::test_where_a_kernel_runs": 3,
    "executors/test_compiled_loops.py::test_loops": 3,
    "executors/test_inductor.py::test_backward_through_autograd_takes_cotangents_of_any_layout": 0,
    "executors/test_inductor.py::test_gradients_of_recurrent_layers": 4,
    "executors/test_inductor.py::test_layouts_that_values_decide_on": 3,
    "executors/test_inductor.py::test_what_reads_a_scatter_comes_after_it": 4,
    "executors/test_nvfuser.py::test_operators": 3,
    "executors/test_nvfuser_symbolic.py::test_one_definition_for_all_sizes": 3,
    "executors/test_quantized.py::test_a_kernel_computes_what_the_composite_means": 3,
    "gallery/test_gallery.py::test_small": 3,
    "laws/test_check_transform.py::test_bugs_that_random_traces_rarely_show": 3,
    "laws/test_control_flow_table.py::test_cell": 4,
    "laws/test_lazy_bits.py::test_derivatives": 4,
    "laws/test_lazy_bits.py::test_values": 4,
    "laws/test_linear_work.py::test_questions_do_not_grow_with_loops": 3,
    "laws/test_outside.py::test_a_change_is_seen_below_a_transform": 4,
    "laws/test_outside.py::test_a_change_is_seen_by_a_transform_without_jit": 5,
    "laws/test_second_order.py::test_second_derivatives": 4,
    "laws/test_second_order.py::test_second_derivatives_of_products_with_zeros": 5,
    "laws/test_single.py::test_laws": 3,
    "laws/test_strategies.py::test_a_program_shrinks_through_its_bodies": 0,
    "laws/test_symbolic.py::test_a_saved_function_is_the_compiled_one": 3,
    "laws/test_symbolic.py::test_hints_change_nothing": 4,
    "laws/test_symbolic.py::test_other_sizes_miss": 4,
    "laws/test_symbolic_numbers.py::test_each_step": 3,
    "meta/test_docs.py::test_page_shows_what_its_code_prints[concepts/law.md]": 0,
    "meta/test_docs.py::test_page_shows_what_its_code_prints[test_your_pass.md]": 0,
    "meta/test_mutations.py::test_a_planted_bug_is_caught": 3,
    "meta/test_mutations.py::test_without_a_bug_nothing_is_caught": 4,
    "models/test_models.py::test_gradients": 4,
    "models/test_models.py::test_logits": 4,
    "models/test_others_on_inductor.py::test_training_is_eagers": 0,
    "models/test_training.py::test_five_steps_are_eager_s": 3,
    "models/test_training.py::test_generate_with_one_program_for_every_token": 3,
    "models/test_training.py::test_published_sizes_are_captured_in_five_seconds": 3,
    "ops/test_autocast.py::test_dtypes_are_those_of_torch_autocast_on_cuda": 4,
    "ops/test_autocast.py::test_values_are_those_of_torch_autocast": 4,
    "ops/test_modules.py::test_module": 4,
    "ops/test_operators.py::test_distances_of_nothing": 3,
    "ops/test_operators.py::test_forward": 4,
    "ops/test_operators.py::test_gradient": 4,
    "ops/test_transforms.py::test_examples_with_a_batch_of_one": 4,
    "ops/test_transforms.py::test_transform": 5,
    "tutorials/test_tutorials.py::test_tutorial[07_laws]": 0,
    "tutorials/test_tutorials.py::test_tutorial[14_quantize]": 0,
    "tutorials/test_tutorials.py::test_tutorial[15_fsdp]": 0,
    "tutorials/test_tutorials.py::test_tutorial[16_qlora]": 0,
    "tutorials/test_tutorials.py::test_tutorial[20_from_lightning_thunder]": 0,
    "tutorials/test_tutorials.py::test_tutorial[21_force_field]": 0,
    "tutorials/test_tutorials.py::test_tutorial[22_an_interpreter_of_your_own]": 0,
    "unit/test_attention.py::test_derivatives_of_any_order": 3,
    "unit/test_batching.py::test_one_program_for_all_batch_sizes": 3,
    "unit/test_benchmarks.py::test_tracing_is_measured": 0,
    "unit/test_cache_fuzz.py::test_no_call_gets_the_program_of_another": 3,
    "unit/test_capture.py::test_random_numbers_in_any_layout_are_those_of_eager": 3,
    "unit/test_capture_modules.py::test_module": 3,
    "unit/test_checkpoint.py::test_under_every_transform": 3,
    "unit/test_checkpoint.py::test_values_and_gradients_are_the_same_bits": 3,
    "unit/test_compositions.py::test_second_derivatives_of_fused_ops": 3,
    "unit/test_compositions.py::test_third_derivatives_of_normalizations": 4,
    "unit/test_concrete_values.py::test_torch_func_answers_alike": 3,
    "unit/test_ctc_loss.py::test_derivatives_that_pytorch_does_not_have": 3,
    "unit/test_data_sizes.py::test_examples_that_share_a_mask_have_one_size": 4,
    "unit/test_data_sizes.py::test_one_program_for_all_data": 4,
    "unit/test_data_sizes.py::test_what_is_found_in_data_keeps_its_name_in_nested_transforms": 3,
    "unit/test_depth.py::test_deep_programs": 3,
    "unit/test_derivatives_inside.py::test_a_write_without_gradients_has_the_derivatives_of_torch_func": 4,
    "unit/test_derivatives_inside.py::test_bodies_that_ask_about_gradients": 3,
    "unit/test_derivatives_inside.py::test_each_level_follows_its_own_arguments": 3,
    "unit/test_derivatives_inside.py::test_rules_are_found_alike_whatever_runs_around": 3,
    "unit/test_eager_calls.py::test_later_calls_are_not_captured": 3,
    "unit/test_export.py::test_an_exported_program_is_the_function": 3,
    "unit/test_facts.py::test_ops_of_another_library_are_not_their_namesakes": 0,
    "unit/test_filled_caches.py::test_filled_caches": 7,
    "unit/test_found_in_bodies.py::test_derivatives_are_those_of_plain_python": 4,
    "unit/test_found_in_bodies.py::test_second_derivatives_are_those_of_plain_python": 3,
    "unit/test_found_in_bodies.py::test_traces_are_valid": 3,
    "unit/test_generators.py::test_gradients_draw_once": 3,
    "unit/test_generators.py::test_programs_draw_what_eager_draws": 3,
    "unit/test_generators.py::test_vmap_draws_what_torch_func_draws": 4,
    "unit/test_given_memory.py::test_random_programs_agree_whatever_regions_do_with_what_they_are_given": 3,
    "unit/test_host_random.py::test_compiled_modules_draw_as_eager_does": 3,
    "unit/test_inspect_memory.py::test_peak_of_training_is_the_measured_one": 3,
    "unit/test_jit_module.py::test_training_is_eager_s": 3,
    "unit/test_jit_nodes.py::test_compiled": 0,
    "unit/test_jit_shared_tensors.py::test_a_result_is_a_view_of_a_written_argument_of_any_size": 3,
    "unit/test_known_results.py::test_answers_from_memory_are_those_of_pytorch": 3,
    "unit/test_layout.py::test_any_layout": 3,
    "unit/test_lookasides.py::test_a_class_that_a_lookaside_was_in_is_let_go": 3,
    "unit/test_lookasides.py::test_properties_and_what_functools_makes": 2,
    "unit/test_lookasides.py::test_what_a_capture_itself_replaces": 3,
    "unit/test_loop_programs.py::test_lowered_is_evaluated_bitwise": 3,
    "unit/test_memory_of_results.py::test_a_view_of_a_result_shows_its_memory": 3,
    "unit/test_memory_of_results.py::test_a_write_that_reads_its_memory_elsewhere": 4,
    "unit/test_memory_of_results.py::test_what_is_read_after_a_write_through_a_conjugate_or_negative_view": 3,
    "unit/test_memory_through_functions.py::test_a_derivative_that_is_memory_of_what_it_is_of": 4,
    "unit/test_memory_through_functions.py::test_a_result_that_is_memory_of_an_argument": 4,
    "unit/test_memory_through_functions.py::test_an_argument_that_is_transposed_in_place_keeps_its_memory": 3,
    "unit/test_module_paths.py::test_equal_layers_are_told_apart": 3,
    "unit/test_optim.py::test_a_parameter_without_gradient_stays_and_counts_its_own_steps": 3,
    "unit/test_optim.py::test_an_optimizer_that_is_made_inside": 3,
    "unit/test_optim.py::test_steps_of_a_schedule": 3,
    "unit/test_outside.py::test_a_change_is_seen_and_nothing_else_is": 3,
    "unit/test_outside_idioms.py::test_what_is_read_by_any_idiom_counts": 4,
    "unit/test_outside_table.py::test_torch_compile": 3,
    "unit/test_overlaps.py::test_an_operand_that_is_written_over_is_read_before": 3,
    "unit/test_packed.py::test_modules_of_packed_sequences": 3,
    "unit/test_random.py::test_a_batch_draws_what_each_key_draws": 3,
    "unit/test_result_types.py::test_types_are_eagers": 3,
    "unit/test_rewrites.py::test_bounds_hold_for_weights_that_are_hard_to_store": 4,
    "unit/test_rewrites.py::test_compute_on_prepared_is_the_original_on_restored": 3,
    "unit/test_rewrites.py::test_what_is_no_number_is_stored_as_none": 3,
    "unit/test_rewrites_any_order.py::test_a_batch_is_one_call_on_codes": 3,
    "unit/test_rewrites_any_order.py::test_any_order": 3,
    "unit/test_rewrites_composed.py::test_autocast_around_and_inside": 4,
    "unit/test_rewrites_composed.py::test_codes_go_into_checkpoints": 3,
    "unit/test_rewrites_composed.py::test_half_precision_neither_overflows_nor_vanishes": 3,
    "unit/test_rewrites_composed.py::test_one_program_for_all_batch_sizes": 3,
    "unit/test_rewrites_in_bodies.py::test_codes_go_into_loops_and_branches": 3,
    "unit/test_rewrites_of_stacks.py::test_layers_of_a_stack_compute_on_codes": 3,
    "unit/test_rewritten_modules.py::test_any_scheme_moves_between_dtypes": 3,
    "unit/test_rewritten_modules.py::test_copies": 3,
    "unit/test_rewritten_modules.py::test_layers": 3,
    "unit/test_side_by_side.py::test_updates_run_over_lists": 3,
    "unit/test_structured_scan.py::test_sqrt_checkpoints_change_nothing_but_memory": 3,
    "unit/test_symbolic.py::test_programs": 4,
    "unit/test_symbolic_bodies.py::test_one_program_for_all_sizes": 3,
    "unit/test_symbolic_python.py::test_builtins_of_found_numbers_are_symbols": 3,
    "unit/test_symbolic_python.py::test_lengths_of_arguments_are_symbols": 3,
    "unit/test_symbolic_python.py::test_the_type_itself_is_asked_of_a_number": 3,
    "unit/test_text.py::test_programs": 3,
    "unit/test_text.py::test_reports": 3,
    "unit/test_torch_func.py::test_as_torch_func": 3,
    "unit/test_training_step.py::test_optimizers_of_torch": 3,
    "unit/test_training_step.py::test_steps": 3,
}
"""Families by file and function, or single members by their id, with n. 0 leaves all to `make thorough`."""


def left_out(names: Iterable[str]) -> set[str]:
    """The tests, by node id, that `--quick` leaves out."""
    found, seen = set[str](), defaultdict[str, int](int)
    for name in names:
        whole = name.removeprefix("tests/")
        family = whole if whole in EVERY else whole.partition("[")[0]
        if family not in EVERY:
            continue
        every, number = EVERY[family], seen[family]
        seen[family] += 1
        if not every or number % every != _FIRST.get(family, 0):
            found.add(name)
    return found


_FIRST = {"ops/test_operators.py::test_gradient": 2}
"""The member that a family begins with, if not the first: no operator runs in both of two families."""
