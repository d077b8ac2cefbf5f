// clang-format off
static PyObject* connect(PyObject*, PyObject* address) {
    data_pointer = reinterpret_cast<decltype(data_pointer)>(PyLong_AsVoidPtr(address));
    Py_RETURN_NONE;
}
static PyMethodDef methods[] = {
    {"connect", connect, METH_O, ""},
${methods}
    {nullptr, nullptr, 0, nullptr}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "${name}", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_${name}(void) { return PyModule_Create(&definition); }
