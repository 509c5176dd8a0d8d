// What holds a pod's namespaces: waits until it is told to end.

#include <signal.h>
#include <stddef.h>

int main(void)
{
    sigset_t ends;
    int signal;

    sigemptyset(&ends);
    sigaddset(&ends, SIGINT);
    sigaddset(&ends, SIGTERM);
    sigprocmask(SIG_BLOCK, &ends, NULL);
    return sigwait(&ends, &signal);
}
