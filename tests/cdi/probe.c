/* Says as what the dynamic loader finds libraries, by name alone; and then what else is given to this container. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static void nodes_in(const char *directory)
{
    DIR *opened = opendir(directory);
    if (!opened)
        return;
    for (struct dirent *entry; (entry = readdir(opened));) {
        char path[512];
        struct stat status;
        snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
        if (lstat(path, &status) || entry->d_name[0] == '.')
            continue;
        if (S_ISDIR(status.st_mode) && !strncmp(entry->d_name, "nvidia", 6))
            nodes_in(path);
        if (S_ISCHR(status.st_mode)) {
            int descriptor = open(path, O_RDWR);
            printf("node %s %u:%u %o %s\n", path, major(status.st_rdev), minor(status.st_rdev),
                   status.st_mode & 07777, descriptor < 0 ? "closed" : "open");
            if (descriptor >= 0)
                close(descriptor);
        }
    }
    closedir(opened);
}

int main(int count, char **arguments)
{
    for (int i = 1; i < count; i++) {
        struct link_map *map;
        void *library = dlopen(arguments[i], RTLD_NOW);
        if (library && !dlinfo(library, RTLD_DI_LINKMAP, &map))
            printf("library %s %s\n", arguments[i], map->l_name);
        else
            printf("library %s -\n", arguments[i]);
    }
    nodes_in("/dev");
    for (char **variable = environ; *variable; variable++)
        printf("variable %s\n", *variable);
    FILE *mounts = fopen("/proc/self/mountinfo", "r");
    char line[4096], path[2048], options[512];
    while (mounts && fgets(line, sizeof line, mounts))
        if (sscanf(line, "%*s %*s %*s %*s %2047s %511s", path, options) == 2)
            printf("mount %s %s\n", path, options);
    return 0;
}
