/* A disk that is full from some operation on, for whatever writes below a folder: preloaded, it stands before libc.

   full_disk(folder, at): the operation number `at` below the folder, counted from 1, and every later one, fails with
   ENOSPC; 0 lets all of them pass. full_disk_count(): how many there were since. Removing files always works. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long full_at, count;

void full_disk(const char *path, long at) {
    snprintf(folder, sizeof folder, "%s", path);
    full_at = at;
    count = 0;
}

long full_disk_count(void) { return count; }

static int full(const char *path) {
    char absolute[2 * PATH_MAX], here[PATH_MAX];
    if (!*folder) return 0;
    if (path[0] != '/') {
        if (!getcwd(here, sizeof here)) return 0;
        snprintf(absolute, sizeof absolute, "%s/%s", here, path);
        path = absolute;
    }
    if (strncmp(path, folder, strlen(folder))) return 0;
    long number = __sync_add_and_fetch(&count, 1);
    if (!full_at || number < full_at) return 0;
    errno = ENOSPC;
    return 1;
}

static int full_fd(int fd) {
    char link[64], path[PATH_MAX];
    if (!*folder) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return full(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name, before, values)                                          \
    int name(before const char *path, int flags, ...) {                     \
        va_list rest;                                                       \
        va_start(rest, flags);                                              \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;           \
        va_end(rest);                                                       \
        if ((flags & O_CREAT) && access(path, F_OK) && full(path)) return -1; \
        return REAL(name)(values path, flags, mode);                        \
    }
#define AND_A_FOLDER int at,
OPEN(open, , )
OPEN(open64, , )
#define VALUE at,
OPEN(openat, AND_A_FOLDER, VALUE)
OPEN(openat64, AND_A_FOLDER, VALUE)

ssize_t write(int fd, const void *data, size_t size) { return full_fd(fd) ? -1 : REAL(write)(fd, data, size); }
ssize_t writev(int fd, const struct iovec *parts, int n) { return full_fd(fd) ? -1 : REAL(writev)(fd, parts, n); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return full_fd(fd) ? -1 : REAL(pwrite)(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return full_fd(fd) ? -1 : REAL(pwrite64)(fd, data, size, at); }
int mkdir(const char *path, mode_t mode) { return full(path) ? -1 : REAL(mkdir)(path, mode); }
int rename(const char *from, const char *to) { return full(to) ? -1 : REAL(rename)(from, to); }
int link(const char *from, const char *to) { return full(to) ? -1 : REAL(link)(from, to); }
int symlink(const char *from, const char *to) { return full(to) ? -1 : REAL(symlink)(from, to); }
