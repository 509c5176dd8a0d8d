// report MAJOR COUNT: what a container was given, on stdout, one thing a line. Then it waits until it is told to end.
//
//   env NAME=VALUE                each variable
//   node PATH MAJOR:MINOR ERRNO   each character device in /dev, and what opening it gave; 0 if it was opened
//   made MINOR ERRNO              the same for a device node that the container makes for itself, below COUNT
//   end
//
// Only the container's device cgroup stands between it and the devices that it makes nodes for.

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

extern char **environ;

static int opens(const char *path)
{
    int file = open(path, O_RDWR | O_NONBLOCK | O_NOCTTY);

    if (file < 0)
        return errno;
    close(file);
    return 0;
}

int main(int count, char **arguments)
{
    sigset_t ends;
    int signal;
    char path[300];
    struct stat status;
    struct dirent *entry;
    DIR *dev = opendir("/dev");

    if (count != 3 || dev == NULL)
        return 2;
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigprocmask(SIG_BLOCK, &ends, NULL);

    for (char **variable = environ; *variable != NULL; variable++)
        printf("env %s\n", *variable);

    while ((entry = readdir(dev)) != NULL) {
        snprintf(path, sizeof path, "/dev/%s", entry->d_name);
        if (lstat(path, &status) == 0 && S_ISCHR(status.st_mode))
            printf("node %s %u:%u %d\n", path, major(status.st_rdev), minor(status.st_rdev), opens(path));
    }

    for (int number = 0; number < atoi(arguments[2]); number++) {
        snprintf(path, sizeof path, "/made%d", number);
        if (mknod(path, S_IFCHR | 0600, makedev(atoi(arguments[1]), number)) != 0)
            return 3;
        printf("made %d %d\n", number, opens(path));
    }

    puts("end");
    fflush(stdout);
    return sigwait(&ends, &signal);
}
