"""Tests of PyTorch's `test/functorch` that say nothing of thunder_fn: a pattern of `Class.test`, and the reason."""

from __future__ import annotations

INTERNALS = "about PyTorch's own levels, wrappers, interpreter stack or dispatch keys"
MAKE_FUNCTIONAL = "about `make_functional` and its relatives, which PyTorch has deprecated; `functional_call` is here"
DYNAMO = "about what Dynamo or `make_fx` makes of torch.func's own frames"
OPTIONS = "gives a pullback `retain_graph` and `create_graph`, which torch.func does not document"
FALLBACK = "about functorch's fallback for ops without a batching rule, and its warning"
VERSION = "about a name that the version of PyTorch that runs it no longer has, or does not have yet"
CUDA = "needs a GPU"
TEXTS = "about the text of torch.func's wrappers, nodes and names"
WORDS = "expects words that PyTorch 2.13 does not say any more, of torch.func either"
RULES = "expects the words of functorch's batching rules, where thunder_fn says what eager says of one example"
STUBS = "maps a torch.autograd.Function whose `forward` is `pass`, which torch.func does not run and thunder_fn traces"
HOP = "expects Dynamo's class or words for a higher-order op, where thunder_fn says which value differs"
GRAPHS = "counts or prints the calls that Dynamo or `make_fx` recorded, where the values agree"
WIDER = "expects an error where thunder_fn gives an answer"
FUNCTIONAL = "turns PyTorch's functionalization on by `torch._enable_functionalization`, and looks at its wrappers"
KERNELS = "expects the words of eager's kernel, where a trace has those of PyTorch's fake kernel"
NUMBERS = "chooses by a number (`cond(x.sum(), ...)`), which thunder_fn refuses; it says to write `x != 0`"

NOT_APPLICABLE: dict[str, str] = {
    r"TestSliceArgnums\.": INTERNALS,
    r"TestMakeFunctional|TestExamplesCorrectness.*(lennard|maml).*": MAKE_FUNCTIONAL,
    r"CombineState|combine_state": MAKE_FUNCTIONAL,
    r"TestComposability\w*\.test_make_fx_vjp": OPTIONS,
    r"^(?!TestCompileTransforms|TestComposability).*(dynamo|torch_compile|make_fx|compile(?!_mode_none))": DYNAMO,
    r"fallback|op_has_batch_rule": FALLBACK,
    r"dispatch_key|unwrap|interpreter|escaped_wrappers|dead_tensor|dump_tensor|level": INTERNALS,
    r"cuda|CUDA": CUDA,
    r"tensor_print_|grad_fn_name|name_wrapping|deprecation_vmap": TEXTS,
    r"functionalize_(fx|opt|optional|nonfunctional)": VERSION,
    r"symeig": VERSION,
    r"autograd_functional|retain_grad_inside|doesnt_support_saved_tensor_hooks": WIDER,
    r"aux_pytree|GradTransform.*invalid_argnums|chunk_jacrev_chunksize_one": WIDER,
    r"function_returns_input.*save_tensors_(input|output)_mark_dirty_False": WORDS,
    r"randomness_same.*batched_(input|other|probability)_(first|last)": WIDER,
    r"in_dims_wrong_type|not_enough_in_dims|fails_with_autograd_function|test_is_contiguous$": WIDER,
    r"inplace_on_captures|view_then_inplace(?!_list_return)|requires_grad_inside": WIDER,
    r"resize_program_inputs": DYNAMO,
    r"predType_(float|int)Tensor": NUMBERS,
    r"TestControlFlow\.test_(scan_(simple_graph|pytree_output|associative_scan)|cond_in_forloop)$": DYNAMO,
    r"test_scan_(\w+_alias|input_mutation)$|test_cond_autograd_different_pytree_output": WIDER,
    r"test_scan_(float_output|one_return|unequal_scan_dim_size|init_non_tensor|init_wrong_\w+)$": HOP,
    r"test_scan_(simple_graph_wrong_dtype|wrong_pytree)$|test_map_illegal_(in|out)puts": HOP,
    r"test_scan_zero_length": VERSION,
    r"test_(tracing_map|nested_map_cond)_real$|test_(scan_pytree_closure|while_loop_pytree_carry)$": GRAPHS,
    r"test_cond_(with_unbacked_sym_pred|symint_operands_\w+|autograd_backward_(inp|out)_out_aliasing)$": GRAPHS,
    r"test_associative_scan_pytree_output$|test_two_hops_not_sharing_code_obj$": GRAPHS,
    r"TestControlFlowTraced\.test_(input_mutation|input_output_alias|cond_trace_set__and_mutate_input$)": WIDER,
    r"test_scan_in_vmap_unbatched_init_error": WIDER,
    r"cond_functionalized_input_aliasing_with_aot_func|test_map_functionalized_aot_func": FUNCTIONAL,
    r"test_map_unfunc_boolean_tensor_for_nested_map_cond": FUNCTIONAL,
    r"cond_functionalized_(input_mutation_on_\w+_branch|output_alias_input)$": GRAPHS,
    r"cond_mismatched_branch_output_dynamic_True_backend_eager": GRAPHS,
    r"test_cond_subgraph_same_shape_env_as_parent": NUMBERS,
    r"test_cond_trace_set__and_mutate_intermediate|test_input_input_alias|test_map_functionalized_elem_alias": WIDER,
    r"test_map_functionalized_(arg|elem)_mutation|test_scan_init_scanned_0": HOP,
    r"test_associative_scan_(sparse_tensor|wrong_pytree)": HOP,
    r"test_vmap_closure_weight_error": KERNELS,
    r"python_dispatcher|test__is_(all|any)_true|test_check_tensor": VERSION,
    r"unsupported_op_err_msg": FALLBACK,
    r"TestVmapOperators\.test_(clone|mm)$": RULES,
    r"TestRandomness\w*\.test_unsupported_random|TestVmapAPI\.test_data_attribute": WIDER,
    r"TestAutogradFunctionVmapAPI\w*\.test_(info_object|in_dims_(single_input|multiple_inputs))": STUBS,
}
"""The first pattern that is found in a test's name says why it is left out."""

TOOLS = "about Dynamo's own tools: its logs, its minifier or its exporter"
TRACED = "expects eager's words alone, where thunder_fn says which traced function raised"

NOT_APPLICABLE_TO_COMPILE: dict[str, str] = {
    r"LoggingTests|StructuredTrace|Minifier|DebugDir": TOOLS,
    r"ReproTests\.test_super_in_staticmethod": TRACED,
    r"TestAOTAutogradWith(Dynamo|Cache)\.": "the tests of TestAOTAutograd once more, which differ in PyTorch's cache",
}
"""The same for PyTorch's tests of torch.compile. A comparison with eager finds most of what does not apply."""
