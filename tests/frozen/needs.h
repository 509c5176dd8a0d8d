/* Included into the stand-in of libnvidia-ml.so.1, so that it asks of the dynamic loader what the genuine one does. */
#undef _GNU_SOURCE
#define _GNU_SOURCE /* RTLD_DEFAULT */
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#undef _GNU_SOURCE /* nvml.c defines it itself */

static __thread char needs_thread[64]; /* by __tls_get_addr, since the library is position-independent */
static pthread_once_t needs_once = PTHREAD_ONCE_INIT;
static pthread_key_t needs_key;

static void needs_make_key(void) { pthread_key_create(&needs_key, NULL); }

__attribute__((constructor)) static void needs(void)
{
    pthread_once(&needs_once, needs_make_key);
    pthread_setspecific(needs_key, needs_thread);
    needs_thread[0] = (char)pow(2.0, (double)(time(NULL) & 3));
    timer_t timer;
    if (timer_create(CLOCK_MONOTONIC, NULL, &timer) == 0) {
        timer_delete(timer);
    }
    const char *child = getenv("NEEDS_CHILD"); /* as the genuine one starts nvidia-modprobe */
    if (child && system(child) != 0) {
        abort();
    }
    if (dlsym(RTLD_DEFAULT, "malloc") == NULL) {
        abort();
    }
}
