/* Preloaded into the executable, says on stderr what its Python compiles and what of that was compiled at build time. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static int hook(const char *event, PyObject *arguments, void *unused)
{
    static int inside; /* what follows raises events, too */
    (void)unused;
    PyObject *line = NULL;
    if (!inside && strcmp(event, "compile") == 0) {
        inside = 1;
        line = PyUnicode_FromFormat("%s %S %R", event, PyTuple_GetItem(arguments, 1), PyTuple_GetItem(arguments, 0));
    } else if (!inside && strcmp(event, "exec") == 0) {
        inside = 1;
        line = PyUnicode_FromFormat("%s %S", event, ((PyCodeObject *)PyTuple_GetItem(arguments, 0))->co_filename);
    }
    if (line) {
        fprintf(stderr, "audit: %s\n", PyUnicode_AsUTF8(line));
        Py_DECREF(line);
        inside = 0;
    }
    return 0;
}

__attribute__((constructor)) static void audit(void) { PySys_AddAuditHook(hook, NULL); }
