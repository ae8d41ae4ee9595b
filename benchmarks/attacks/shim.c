/* A library that is preloaded into every process of a run. It makes the disk fail, shifts the clock and records syncs.

   ATTACK_CONTROL names a file with a struct control, which every process maps. ATTACK_SYNCED names a file to which the
   processes append these lines:
     C inode                 a file was created or truncated
     F inode bytes           the first so many bytes of a file are on disk
     D inode, then N inode name ..., then E      the names in a folder are on disk */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control {
    int64_t clock_s;   /* added to the system clock */
    int32_t error;     /* errno of failing disk calls, 0 for none */
    char path[244];    /* calls fail for paths that contain this */
};

static struct control none, *control = &none;
static int synced = -1;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void) {
    const char *file = getenv("ATTACK_CONTROL"), *list = getenv("ATTACK_SYNCED");
    int fd = file ? REAL(open)(file, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        void *map = mmap(NULL, sizeof *control, PROT_READ, MAP_SHARED, fd, 0);
        if (map != MAP_FAILED) control = map;
        close(fd);
    }
    if (list) synced = REAL(open)(list, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
}

static int fails(const char *path) {
    if (!control->error || !path || !strstr(path, control->path)) return 0;
    errno = control->error;
    return 1;
}

static int path_of(int fd, char *path, size_t size) {
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t got = readlink(link, path, size - 1);
    if (got < 0) return 0;
    path[got] = 0;
    return path[0] == '/';
}

static int fails_fd(int fd) {
    char path[4096];
    int before = errno;
    if (!control->error) return 0;
    if (path_of(fd, path, sizeof path) && fails(path)) return 1;
    errno = before;
    return 0;
}

static void note(const char *words, size_t size) {
    if (synced >= 0 && REAL(write)(synced, words, size) < 0) abort();
}

static void note_made(int fd, int flags) {
    struct stat info;
    char line[64];
    if (synced < 0 || fd < 0 || !(flags & (O_CREAT | O_TRUNC)) || fstat(fd, &info) || info.st_size) return;
    if (S_ISREG(info.st_mode)) note(line, snprintf(line, sizeof line, "C %lu\n", info.st_ino));
}

static void note_synced(int fd) {
    struct stat info;
    char path[4096], *list = NULL;
    size_t size = 0;
    if (synced < 0 || fstat(fd, &info)) return;
    if (S_ISREG(info.st_mode)) {
        note(path, snprintf(path, sizeof path, "F %lu %ld\n", info.st_ino, info.st_size));
        return;
    }
    DIR *folder = S_ISDIR(info.st_mode) && path_of(fd, path, sizeof path) ? opendir(path) : NULL;
    FILE *lines = folder ? open_memstream(&list, &size) : NULL;
    if (!lines) return;
    fprintf(lines, "D %lu\n", info.st_ino);
    for (struct dirent *entry; (entry = readdir(folder));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            fprintf(lines, "N %lu %s\n", entry->d_ino, entry->d_name);
    fprintf(lines, "E\n");
    fclose(lines);
    closedir(folder);
    note(list, size);
    free(list);
}

static int for_writing(int flags) {
    return (flags & O_ACCMODE) != O_RDONLY && (control->error != ENOSPC || flags & O_CREAT);
}

#define OPEN(name)                                                                   \
    int name(const char *path, int flags, ...) {                                     \
        va_list more;                                                                \
        va_start(more, flags);                                                       \
        int mode = va_arg(more, int), fd;                                            \
        va_end(more);                                                                \
        if (for_writing(flags) && fails(path)) return -1;                            \
        note_made(fd = REAL(name)(path, flags, mode), flags);                        \
        return fd;                                                                   \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                 \
    int name(int at, const char *path, int flags, ...) {                             \
        va_list more;                                                                \
        va_start(more, flags);                                                       \
        int mode = va_arg(more, int), fd;                                            \
        va_end(more);                                                                \
        if (for_writing(flags) && fails(path)) return -1;                            \
        note_made(fd = REAL(name)(at, path, flags, mode), flags);                    \
        return fd;                                                                   \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int fd, const void *data, size_t size) {
    if (fails_fd(fd)) return -1;
    return REAL(write)(fd, data, size);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (fails_fd(fd)) return -1;
    return REAL(writev)(fd, parts, count);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    if (fails_fd(fd)) return -1;
    return REAL(pwrite64)(fd, data, size, at);
}

#define SYNC(name)                                                                   \
    int name(int fd) {                                                               \
        if (control->error != ENOSPC && fails_fd(fd)) return -1;                     \
        int result = REAL(name)(fd);                                                 \
        if (!result) note_synced(fd);                                                \
        return result;                                                               \
    }
SYNC(fsync)
SYNC(fdatasync)

int rename(const char *from, const char *to) {
    if (fails(to)) return -1;
    return REAL(rename)(from, to);
}

int renameat(int at, const char *from, int into, const char *to) {
    if (fails(to)) return -1;
    return REAL(renameat)(at, from, into, to);
}

int mkdir(const char *path, mode_t mode) {
    if (fails(path)) return -1;
    return REAL(mkdir)(path, mode);
}

int ftruncate64(int fd, off64_t size) {
    if (control->error != ENOSPC && fails_fd(fd)) return -1;
    return REAL(ftruncate64)(fd, size);
}

int clock_gettime(clockid_t which, struct timespec *now) {
    int result = REAL(clock_gettime)(which, now);
    if (!result && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) now->tv_sec += control->clock_s;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int result = REAL(gettimeofday)(now, zone);
    if (!result) now->tv_sec += control->clock_s;
    return result;
}

time_t time(time_t *into) {
    time_t now = REAL(time)(NULL) + control->clock_s;
    if (into) *into = now;
    return now;
}
