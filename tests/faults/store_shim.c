/* A disk that fails when told: preloaded into a store process, ruled by a small file that both sides map.
 *
 * Only files under the directory of `struct orders` are touched, only the files of segments where `segments_only` is set.
 * From the (`skip`+1)th matching call on, `times` calls fail with `error`, or write half (error == SHORT).
 * `delay_us` is slept in every matching sync. A bad range gives SIGBUS under a map and EIO in plain reads,
 * as a sector does that the disk cannot read any more. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include <stdio.h>

enum { SYNC = 1, WRITE = 2, NAMES = 4 };
enum { SHORT = -1 };

struct orders {
    int32_t calls, skip, times, error, delay_us, segments_only, hits, seen;
    int64_t bad_offset, bad_bytes;
    char bad_file[256];
    char directory[256];
};

static struct orders *orders;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("STORE_SHIM");
    int fd = path ? open(path, O_RDWR) : -1;
    if (fd < 0) return;
    void *map = mmap(NULL, sizeof *orders, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map != MAP_FAILED) orders = map;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int path_matches(const char *path) {
    size_t length = strlen(path);
    if (strncmp(path, orders->directory, strlen(orders->directory))) return 0;
    if (!orders->segments_only) return 1;
    return length > 4 && (!strcmp(path + length - 4, ".mdb") || !strcmp(path + length - 4, ".dat"));
}

static int path_of(int fd, char *path, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, size - 1);
    path[length > 0 ? length : 0] = 0;
    return length > 0;
}

/* The error that this call is to end with, 0 to let it through. */
static int verdict(int call, const char *path) {
    if (!orders || !(orders->calls & call) || !path_matches(path)) return 0;
    __sync_fetch_and_add(&orders->seen, 1);
    if (__sync_fetch_and_sub(&orders->skip, 1) > 0) return 0;
    if (__sync_fetch_and_sub(&orders->times, 1) <= 0) return 0;
    __sync_fetch_and_add(&orders->hits, 1);
    return orders->error;
}

static int verdict_fd(int call, int fd) {
    char path[512];
    if (!orders || !(orders->calls & call) || !path_of(fd, path, sizeof path)) return 0;
    if (call == SYNC && orders->delay_us && path_matches(path)) usleep(orders->delay_us);
    return verdict(call, path);
}

#define FAIL(call, fd) do { int e = verdict_fd(call, fd); if (e > 0) { errno = e; return -1; } } while (0)

int fdatasync(int fd) { FAIL(SYNC, fd); return REAL(fdatasync)(fd); }
int fsync(int fd) { FAIL(SYNC, fd); return REAL(fsync)(fd); }

#define WRITER(name)                                                               \
    ssize_t name(int fd, const void *data, size_t size, off_t offset) {            \
        int e = verdict_fd(WRITE, fd);                                             \
        if (e > 0) { errno = e; return -1; }                                       \
        return REAL(name)(fd, data, e == SHORT ? size / 2 : size, offset);         \
    }
WRITER(pwrite)
WRITER(pwrite64)

ssize_t writev(int fd, const struct iovec *parts, int count) {
    int e = verdict_fd(WRITE, fd);
    if (e > 0) { errno = e; return -1; }
    return REAL(writev)(fd, parts, e == SHORT ? 1 : count);
}

/* Python calls the forms with flags. */
#define PARTS_WRITER(name, flags_parameter, flags_argument)                                      \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset flags_parameter) {   \
        int e = verdict_fd(WRITE, fd);                                                           \
        if (e > 0) { errno = e; return -1; }                                                     \
        return REAL(name)(fd, parts, e == SHORT ? 2 : count, offset flags_argument);             \
    }
#define COMMA ,
PARTS_WRITER(pwritev, , )
PARTS_WRITER(pwritev64, , )
PARTS_WRITER(pwritev2, COMMA int flags, COMMA flags)
PARTS_WRITER(pwritev64v2, COMMA int flags, COMMA flags)

ssize_t write(int fd, const void *data, size_t size) {
    int e = verdict_fd(WRITE, fd);
    if (e > 0) { errno = e; return -1; }
    return REAL(write)(fd, data, e == SHORT ? size / 2 : size);
}

#define NAMED(name, path) do { int e = verdict(NAMES, path); if (e > 0) { errno = e; return -1; } } while (0)

int mkdir(const char *path, mode_t mode) { NAMED(mkdir, path); return REAL(mkdir)(path, mode); }
int unlink(const char *path) { NAMED(unlink, path); return REAL(unlink)(path); }
int rmdir(const char *path) { NAMED(rmdir, path); return REAL(rmdir)(path); }
int rename(const char *from, const char *to) { NAMED(rename, from); return REAL(rename)(from, to); }

#define OPENER(name)                                                               \
    int name(const char *path, int flags, ...) {                                   \
        va_list more;                                                              \
        va_start(more, flags);                                                     \
        mode_t mode = va_arg(more, int);                                           \
        va_end(more);                                                              \
        if (flags & (O_CREAT | O_WRONLY | O_RDWR)) NAMED(name, path);              \
        return REAL(name)(path, flags, mode);                                      \
    }
OPENER(open)
OPENER(open64)

static int is_bad(int fd, off_t start, size_t size, off_t *first, size_t *length) {
    char path[512];
    if (!orders || !orders->bad_bytes || !path_of(fd, path, sizeof path)) return 0;
    if (strcmp(path, orders->bad_file)) return 0;
    off_t end = orders->bad_offset + orders->bad_bytes, stop = start + (off_t)size;
    *first = orders->bad_offset > start ? orders->bad_offset : start;
    *length = (size_t)((end < stop ? end : stop) - *first);
    return *first < stop && *first < end;
}

#define READER(name)                                                               \
    ssize_t name(int fd, void *data, size_t size, off_t offset) {                  \
        off_t first;                                                               \
        size_t length;                                                             \
        if (is_bad(fd, offset, size, &first, &length)) { errno = EIO; return -1; } \
        return REAL(name)(fd, data, size, offset);                                 \
    }
READER(pread)
READER(pread64)

static int any_is_bad(int fd, const struct iovec *parts, int count, off_t offset) {
    off_t first;
    size_t length, size = 0;
    for (int i = 0; i < count; i++) size += parts[i].iov_len;
    return is_bad(fd, offset, size, &first, &length);
}

#define PARTS_READER(name, flags_parameter, flags_argument)                                      \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset flags_parameter) {   \
        if (any_is_bad(fd, parts, count, offset)) { errno = EIO; return -1; }                    \
        return REAL(name)(fd, parts, count, offset flags_argument);                              \
    }
PARTS_READER(preadv, , )
PARTS_READER(preadv64, , )
PARTS_READER(preadv2, COMMA int flags, COMMA flags)
PARTS_READER(preadv64v2, COMMA int flags, COMMA flags)

ssize_t read(int fd, void *data, size_t size) {
    off_t first;
    size_t length;
    if (orders && orders->bad_bytes && is_bad(fd, lseek(fd, 0, SEEK_CUR), size, &first, &length)) {
        errno = EIO;
        return -1;
    }
    return REAL(read)(fd, data, size);
}

#define MAPPER(name)                                                               \
    void *name(void *at, size_t size, int prot, int flags, int fd, off_t offset) { \
        void *map = REAL(name)(at, size, prot, flags, fd, offset);                 \
        off_t first;                                                               \
        size_t length;                                                             \
        if (map != MAP_FAILED && fd >= 0 && is_bad(fd, offset, size, &first, &length)) { \
            int empty = memfd_create("a bad sector", 0);                           \
            REAL(name)((char *)map + (first - offset), length, PROT_READ,          \
                       MAP_SHARED | MAP_FIXED, empty, 0);                          \
            close(empty);                                                          \
        }                                                                          \
        return map;                                                                \
    }
MAPPER(mmap)
MAPPER(mmap64)
