/* A library that is preloaded into every process of a run. It delays each sync of a file or folder whose path contains
   SLOW_PATH by SLOW_S seconds. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void wait_for(int fd) {
    const char *part = getenv("SLOW_PATH"), *seconds = getenv("SLOW_S");
    char link[32], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0 || !part || !seconds) return;
    path[size] = 0;
    if (!strstr(path, part)) return;
    double whole = atof(seconds);
    struct timespec pause = {(time_t)whole, (long)(1e9 * (whole - (time_t)whole))};
    nanosleep(&pause, NULL);
}

#define SYNC(name)                                                                   \
    int name(int fd) {                                                               \
        wait_for(fd);                                                                \
        return ((__typeof__(&name))dlsym(RTLD_NEXT, #name))(fd);                     \
    }
SYNC(fsync)
SYNC(fdatasync)
