/* A disk that is full, or may only be read, from some operation on, for whatever writes below a folder: preloaded, it
   stands before libc.

   full_disk(folder, at, error): the operation number `at` below the folder, counted from 1, and every later one, fails
   with this errno; of a write at `at`, half comes through before, as on a full disk. 0 lets all of them pass.
   full_disk_count(): how many there were since. On a full disk removing files works, and so does opening those that
   are there; with EROFS neither, and access() says so. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PASSES, HALF, FAILS };
static char folder[PATH_MAX];
static long full_at, count;
static int error;

void full_disk(const char *path, long at, int with) {
    snprintf(folder, sizeof folder, "%s", path);
    full_at = at;
    error = with;
    count = 0;
}

long full_disk_count(void) { return count; }

static int operation(const char *path) {
    char absolute[2 * PATH_MAX], here[PATH_MAX];
    if (!*folder) return PASSES;
    if (path[0] != '/') {
        if (!getcwd(here, sizeof here)) return PASSES;
        snprintf(absolute, sizeof absolute, "%s/%s", here, path);
        path = absolute;
    }
    if (strncmp(path, folder, strlen(folder))) return PASSES;
    long number = __sync_add_and_fetch(&count, 1);
    if (!full_at || number < full_at) return PASSES;
    errno = error;
    return number == full_at ? HALF : FAILS;
}

static int operation_fd(int fd) {
    char link[64], path[PATH_MAX];
    if (!*folder) return PASSES;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return PASSES;
    path[size] = 0;
    return operation(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name, before, values)                                               \
    int name(before const char *path, int flags, ...) {                          \
        va_list rest;                                                            \
        va_start(rest, flags);                                                   \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                \
        va_end(rest);                                                            \
        int there = !REAL(access)(path, F_OK);                                   \
        int changes = there ? error == EROFS && (flags & O_ACCMODE) : flags & O_CREAT; \
        if (changes && operation(path)) return -1;                               \
        return REAL(name)(values path, flags, mode);                             \
    }
#define AND_A_FOLDER int at,
OPEN(open, , )
OPEN(open64, , )
#define VALUE at,
OPEN(openat, AND_A_FOLDER, VALUE)
OPEN(openat64, AND_A_FOLDER, VALUE)

/* Some bytes of `size` into fd: half of them where the disk gets full. */
#define WRITE(name, fd, size, arguments, ...)                       \
    ssize_t name(__VA_ARGS__) {                                     \
        int what = operation_fd(fd);                                \
        if (what == FAILS || (what == HALF && size < 2)) return -1; \
        if (what == HALF) size /= 2;                                \
        return REAL(name) arguments;                                \
    }
WRITE(write, fd, size, (fd, data, size), int fd, const void *data, size_t size)
WRITE(pwrite, fd, size, (fd, data, size, at), int fd, const void *data, size_t size, off_t at)
WRITE(pwrite64, fd, size, (fd, data, size, at), int fd, const void *data, size_t size, off64_t at)
WRITE(sendfile, to, size, (to, from, at, size), int to, int from, off_t *at, size_t size)
WRITE(sendfile64, to, size, (to, from, at, size), int to, int from, off64_t *at, size_t size)

ssize_t writev(int fd, const struct iovec *parts, int n) { return operation_fd(fd) ? -1 : REAL(writev)(fd, parts, n); }
int fsync(int fd) { return operation_fd(fd) ? -1 : REAL(fsync)(fd); }
int ftruncate(int fd, off_t size) { return operation_fd(fd) ? -1 : REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { return operation_fd(fd) ? -1 : REAL(ftruncate64)(fd, size); }
int mkdir(const char *path, mode_t mode) { return operation(path) ? -1 : REAL(mkdir)(path, mode); }
int rename(const char *from, const char *to) { return operation(to) ? -1 : REAL(rename)(from, to); }
int link(const char *from, const char *to) { return operation(to) ? -1 : REAL(link)(from, to); }
int symlink(const char *from, const char *to) { return operation(to) ? -1 : REAL(symlink)(from, to); }

int unlink(const char *path) { return error == EROFS && operation(path) ? -1 : REAL(unlink)(path); }
int rmdir(const char *path) { return error == EROFS && operation(path) ? -1 : REAL(rmdir)(path); }
int unlinkat(int at, const char *path, int flags) {  /* shutil.rmtree's, of names in an open folder */
    return error == EROFS && operation_fd(at) ? -1 : REAL(unlinkat)(at, path, flags);
}
int access(const char *path, int mode) {
    return error == EROFS && (mode & W_OK) && operation(path) ? -1 : REAL(access)(path, mode);
}
