/* A stand-in for libcuda.so.1, which finds another part of the driver by name, as the real one does. */

#include <dlfcn.h>

int cuInit(void)
{
    return dlopen("libnvidia-ptxjitcompiler.so.1", RTLD_NOW) ? 42 : 1;
}
