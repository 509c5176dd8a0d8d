/* A stand-in for nvidia-modprobe: notes how it was called, and makes the nodes, as plain files, in the root that it has. */

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

static void touch(const char *path)
{
    int file = open(path, O_CREAT | O_WRONLY, 0600);
    if (file >= 0) {
        close(file);
    }
}

int main(int count, char **words)
{
    FILE *log = fopen("/log", "a");
    for (int index = 1; index < count; index++) {
        fprintf(log, "%s ", words[index]);
    }
    for (char **variable = environ; *variable; variable++) {
        fprintf(log, "%s ", *variable);
    }
    fprintf(log, "\n");
    fclose(log);
    if (access("/hang", F_OK) == 0) {
        pause();
    }
    if (access("/fail", F_OK) == 0) {
        fprintf(stderr, "modprobe: FATAL:\nModule nvidia-uvm not found\n");
        return 3;
    }
    for (int index = 1; index < count && access("/idle", F_OK); index++) {
        if (strcmp(words[index], "-u") == 0) {
            touch("/dev/nvidia-uvm");
            touch("/dev/nvidia-uvm-tools");
        }
        if (strcmp(words[index], "-f") == 0) {
            touch(strstr(words[index + 1], "/ci") ? "/dev/nvidia-caps/nvidia-cap67" : "/dev/nvidia-caps/nvidia-cap66");
        }
    }
    return 0;
}
