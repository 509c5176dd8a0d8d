/* What a CUDA program does first: it finds the driver by name alone. */

#include <dlfcn.h>
#include <stdio.h>

int main(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    int (*start)(void) = library ? (int (*)(void))dlsym(library, "cuInit") : NULL;
    if (!start) {
        printf("%s\n", dlerror());
        return 1;
    }
    printf("cuInit says %d\n", start());
    return 0;
}
