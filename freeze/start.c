/* The program that launcher.c maps: an embedded Python that knows nothing of the host's.
 *
 * Its NEEDED entries name every bundled library by its descriptor (/proc/self/fd/N, see bundle.py), so that all of them
 * are loaded before any is asked for by its soname: then the dynamic loader never searches the host for one.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <fcntl.h>
#include <nss.h>
#include <unistd.h>

static void check(PyStatus status)
{
    if (PyStatus_Exception(status)) {
        Py_ExitStatusException(status);
    }
}

int main(int argc, char **argv)
{
    /* Mapped already. What is left, extension modules and the archive of modules, is for us alone. */
    for (int fd = FIRST_FD; fd < FIRST_MODULE; fd++) {
        close(fd);
    }
    for (int fd = FIRST_MODULE; fd <= ARCHIVE; fd++) {
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
    /* nsswitch.conf of the host may name modules that fit the host's glibc and not ours. */
    __nss_configure_lookup("passwd", "files");
    __nss_configure_lookup("group", "files");
    __nss_configure_lookup("hosts", "files dns");

    PyPreConfig preconfig;
    PyPreConfig_InitIsolatedConfig(&preconfig);
    preconfig.utf8_mode = 1;
    check(Py_PreInitialize(&preconfig));

    char executable[4096];
    ssize_t size = readlink("/proc/self/exe", executable, sizeof executable - 1);
    executable[size < 0 ? 0 : size] = '\0';
    char archive[32];
    snprintf(archive, sizeof archive, "/proc/self/fd/%d", ARCHIVE);

    PyConfig config;
    PyConfig_InitIsolatedConfig(&config);
    config.install_signal_handlers = 1;
    config.site_import = 0;
    config.write_bytecode = 0;
    config.optimization_level = 2;
    config.pathconfig_warnings = 0;
    config.module_search_paths_set = 1;
    wchar_t *path = Py_DecodeLocale(archive, NULL);
    check(PyWideStringList_Append(&config.module_search_paths, path));
    check(PyConfig_SetBytesArgv(&config, argc, argv));
    check(PyConfig_SetBytesString(&config, &config.executable, executable));
    check(PyConfig_SetString(&config, &config.base_executable, config.executable));
    check(PyConfig_SetString(&config, &config.home, L"/proc/self/fd"));
    check(PyConfig_SetString(&config, &config.run_command, L"import sys, nvplug; sys.exit(nvplug.main())"));
    check(Py_InitializeFromConfig(&config));
    PyConfig_Clear(&config);
    if (!PyImport_ImportModule("_boot")) {
        PyErr_Print();
        return 1;
    }
    return Py_RunMain();
}
