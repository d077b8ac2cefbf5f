// clang-format off
namespace ${key} {
${source}
}
static PyObject* call_${key}(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != ${count}) {
        PyErr_SetString(PyExc_TypeError, "${key} takes ${count} arguments");
        return nullptr;
    }
    try {
        ${key}::kernel(${arguments});
    } catch (std::exception const& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}
