#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdexcept>

static void* (*data_pointer)(PyObject*);

template <typename T> static inline T argument(PyObject* value) {
    if constexpr (std::is_pointer_v<T>) {
        return static_cast<T>(data_pointer(value));
    } else if constexpr (std::is_floating_point_v<T>) {
        return static_cast<T>(PyFloat_AsDouble(value));
    } else {
        return static_cast<T>(PyLong_AsLongLong(value));
    }
}
