/* LD_PRELOAD library that records the calls of a process that change files below a directory, and makes some of them
   fail; for tests.crash.power and tests.crash.disk_faults.

   PERSISTKV_RECORD_ROOT  the directory
   PERSISTKV_RECORD_LOG   the file to which records are appended, outside of the directory
   PERSISTKV_RECORD_DIE   if set to n: the process is killed in its n-th synchronous write (LMDB's meta page), when the
                          bytes are in the page cache, but not on the disk
   PERSISTKV_RECORD_DIE_AT  if set to n: the same in its n-th call of any kind; a sync has synced nothing at this point
   PERSISTKV_RECORD_FAIL  if set to "k count errno how": count calls fail with errno, beginning with the k-th call; if k
                          is negative, with the -k-th synchronous write. Values of how:
                          1: a failed call is not executed
                          2: a failed call is executed, and then reports the error
                          3: a write is executed for half of its bytes, and returns this number (a short write, no
                             error); only writes are counted
                          4: the first failed call is executed, the others are not
   PERSISTKV_RECORD_STOP_AT  if set to n: the process stops itself (SIGSTOP) before its n-th call
   PERSISTKV_RECORD_SPARE  one path, relative to the root, whose calls do not fail and are not counted for FAIL

   The variables are read when the process starts, and when it calls persistkv_record_begin, which resets the counts.

   A record consists of struct head, the path relative to the root, and, for a write, its bytes. Records are in the
   order in which the calls returned: one lock is held during each call. Changes of files by means that are not modelled
   here (shared writable mappings, renames) are recorded as UNMODELLED, which the simulator rejects. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, SYNCED_WRITE = 2, SYNC = 3, RESIZE = 4, ALLOCATE = 5, CREATE = 6, MKDIR = 7, UNMODELLED = 8, FAILED = 9, REMOVE = 10, PUNCH = 11 };
enum { PASSES = 0, UNDONE = 1, DONE = 2, HALF = 3, DONE_ONCE = 4 };

struct head {
    uint32_t op;
    uint32_t path_length;
    uint64_t offset;
    uint64_t length;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length;
static int log_fd = -1;
static long deadly, deadly_call, stopping_call;
static long calls, first_failing, failing;
static int fail_errno, fail_how;
static const char *spared;

#define REAL(type, name, ...)                                      \
    static type (*real)(__VA_ARGS__);                              \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static void append(const void *data, size_t length) {
    while (length) {
        ssize_t done = syscall(SYS_write, log_fd, data, length);
        if (done < 0) abort();
        data = (const char *)data + done;
        length -= done;
    }
}

static int is_last(long *left) { return *left && !--*left; }

static void record(int op, const char *path, uint64_t offset, uint64_t length) {
    struct head head = {op, strlen(path), offset, length};
    append(&head, sizeof head);
    append(path, head.path_length);
}

/* Record a call that succeeded and is not a write. */
static void record_call(int op, const char *path, uint64_t offset, uint64_t length) {
    int dies = is_last(&deadly_call);
    if (!dies || op != SYNC) record(op, path, offset, length);
    if (dies) kill(getpid(), SIGKILL);
}

/* Count a call that changes files, and return how it must end. */
static int end_of(int op, const char *path) {
    if (fail_how == HALF && op != WRITE && op != SYNCED_WRITE) return PASSES;
    if (spared && !strcmp(path, spared)) return PASSES;
    calls++;
    if (is_last(&stopping_call)) kill(getpid(), SIGSTOP);
    if (first_failing < 0 && op == SYNCED_WRITE && !++first_failing) first_failing = calls;
    if (first_failing <= 0 || calls < first_failing || calls >= first_failing + failing) return PASSES;
    int how = fail_how == DONE_ONCE ? (calls == first_failing ? DONE : UNDONE) : fail_how;
    record(FAILED, path, op == SYNCED_WRITE ? WRITE : op, how == DONE); /* 1: the record of the executed call follows */
    return how;
}

long persistkv_record_calls(void) { return calls; }

__attribute__((constructor)) void persistkv_record_begin(void) {
    const char *directory = getenv("PERSISTKV_RECORD_ROOT"), *log = getenv("PERSISTKV_RECORD_LOG");
    const char *die = getenv("PERSISTKV_RECORD_DIE"), *fail = getenv("PERSISTKV_RECORD_FAIL");
    if (log_fd >= 0) close(log_fd);
    log_fd = -1;
    if (!directory || !log || !realpath(directory, root)) return;
    root_length = strlen(root);
    calls = first_failing = failing = fail_how = 0;
    if (fail && sscanf(fail, "%ld %ld %d %d", &first_failing, &failing, &fail_errno, &fail_how) != 4) abort();
    spared = getenv("PERSISTKV_RECORD_SPARE");
    const char *die_at = getenv("PERSISTKV_RECORD_DIE_AT");
    deadly = die ? atol(die) : 0;
    deadly_call = die_at ? atol(die_at) : 0;
    const char *stop_at = getenv("PERSISTKV_RECORD_STOP_AT");
    stopping_call = stop_at ? atol(stop_at) : 0;
    log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

/* Return the path relative to the root; NULL if it is not below the root. */
static const char *below(const char *path) {
    if (log_fd < 0 || strncmp(path, root, root_length)) return NULL;
    if (!path[root_length]) return ".";
    return path[root_length] == '/' ? path + root_length + 1 : NULL;
}

static const char *path_of(int fd, char *buffer) {
    char link[64];
    if (log_fd < 0) return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, buffer, PATH_MAX - 1);
    if (length < 0) return NULL;
    buffer[length] = 0;
    return below(buffer);
}

/* Return the path of a file that may not exist yet: the resolved path of its directory, and its name. */
static const char *path_at(int directory, const char *name, char *buffer) {
    char given[PATH_MAX], parent[PATH_MAX];
    if (log_fd < 0) return NULL;
    if (name[0] == '/' || directory == AT_FDCWD) {
        snprintf(given, sizeof given, "%s", name);
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        ssize_t length = readlink(link, parent, sizeof parent - 1);
        if (length < 0) return NULL;
        parent[length] = 0;
        if (snprintf(given, sizeof given, "%s/%s", parent, name) >= (int)sizeof given) return NULL;
    }
    char *slash = strrchr(given, '/');
    const char *last = slash ? slash + 1 : given;
    if (slash) *slash = 0;
    if (!realpath(slash ? (*given ? given : "/") : ".", parent)) return NULL;
    if (snprintf(buffer, PATH_MAX, "%s/%s", parent, last) >= PATH_MAX) return NULL;
    return below(buffer);
}

/* Writes */

static void record_write(int fd, const char *path, uint64_t offset, const struct iovec *parts, int count,
                         uint64_t length, int fails) {
    int synced = !fails && fcntl(fd, F_GETFL) & O_DSYNC, dies = is_last(&deadly_call) | (synced && is_last(&deadly));
    record(synced && !dies ? SYNCED_WRITE : WRITE, path, offset, length);
    for (int i = 0; i < count && length; i++) {
        size_t part = parts[i].iov_len < length ? parts[i].iov_len : length;
        append(parts[i].iov_base, part);
        length -= part;
    }
    if (dies) kill(getpid(), SIGKILL);
}

static uint64_t position(int fd) {
    struct stat status;
    if (fcntl(fd, F_GETFL) & O_APPEND && !fstat(fd, &status)) return status.st_size;
    off_t now = lseek(fd, 0, SEEK_CUR);
    return now < 0 ? 0 : now;
}

enum { AT, NEXT };

/* Write half of the first part, in whole pages if it has at least two, as O_DIRECT requires. */
static ssize_t write_half(int fd, const struct iovec *parts, int where, uint64_t offset) {
    size_t half = parts->iov_len / 2;
    if (half >= 4096) half -= half % 4096;
    if (where == NEXT) return syscall(SYS_write, fd, parts->iov_base, half);
    return syscall(SYS_pwrite64, fd, parts->iov_base, half, offset);
}

#define RECORDED(fd, parts, count, where, offset, call)                                 \
    char buffer[PATH_MAX];                                                              \
    const char *path = path_of(fd, buffer);                                             \
    if (!path) return call;                                                             \
    pthread_mutex_lock(&lock);                                                          \
    uint64_t at = offset;                                                               \
    int end = end_of(fcntl(fd, F_GETFL) & O_DSYNC ? SYNCED_WRITE : WRITE, path);        \
    ssize_t done = end == UNDONE ? -1 : end == HALF ? write_half(fd, parts, where, at) : call; \
    int error = end == UNDONE ? fail_errno : errno;                                     \
    if (done > 0) record_write(fd, path, at, parts, count, done, end == DONE);          \
    if (end == DONE) done = -1, error = fail_errno;                                     \
    pthread_mutex_unlock(&lock);                                                        \
    errno = error;                                                                      \
    return done

ssize_t write(int fd, const void *data, size_t length) {
    REAL(ssize_t, "write", int, const void *, size_t);
    struct iovec part = {(void *)data, length};
    RECORDED(fd, &part, 1, NEXT, position(fd), real(fd, data, length));
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    RECORDED(fd, parts, count, NEXT, position(fd), real(fd, parts, count));
}

#define PWRITE(name, offset_t)                                                          \
    ssize_t name(int fd, const void *data, size_t length, offset_t offset) {            \
        REAL(ssize_t, #name, int, const void *, size_t, offset_t);                      \
        struct iovec part = {(void *)data, length};                                     \
        RECORDED(fd, &part, 1, AT, offset, real(fd, data, length, offset));             \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define PWRITEV(name, offset_t)                                                         \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_t offset) {       \
        REAL(ssize_t, #name, int, const struct iovec *, int, offset_t);                 \
        RECORDED(fd, parts, count, AT, offset, real(fd, parts, count, offset));         \
    }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)

#define PWRITEV2(name, offset_t)                                                        \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_t offset, int flags) { \
        REAL(ssize_t, #name, int, const struct iovec *, int, offset_t, int);            \
        RECORDED(fd, parts, count, AT, offset, real(fd, parts, count, offset, flags));  \
    }
PWRITEV2(pwritev2, off_t)
PWRITEV2(pwritev64v2, off64_t)

/* Calls that are one record without bytes if they succeed */

#define DONE_TO(fd, op, offset, length, call, failed)                                   \
    char buffer[PATH_MAX];                                                              \
    const char *path = path_of(fd, buffer);                                             \
    if (!path) return call;                                                             \
    pthread_mutex_lock(&lock);                                                          \
    int end = end_of(op, path), result = end == UNDONE ? failed : call, error = errno;  \
    if (!result && (end != DONE || op != SYNC)) record_call(op, path, offset, length);  \
    if (end == DONE) result = failed;                                                   \
    pthread_mutex_unlock(&lock);                                                        \
    errno = end == UNDONE || end == DONE ? fail_errno : error;                          \
    return result

int fsync(int fd) {
    REAL(int, "fsync", int);
    DONE_TO(fd, SYNC, 0, 0, real(fd), -1);
}

int fdatasync(int fd) {
    REAL(int, "fdatasync", int);
    DONE_TO(fd, SYNC, 0, 0, real(fd), -1);
}

#define FTRUNCATE(name, offset_t)                                                       \
    int name(int fd, offset_t length) {                                                 \
        REAL(int, #name, int, offset_t);                                                \
        DONE_TO(fd, RESIZE, 0, length, real(fd, length), -1);                           \
    }
FTRUNCATE(ftruncate, off_t)
FTRUNCATE(ftruncate64, off64_t)

#define POSIX_FALLOCATE(name, offset_t)                                                 \
    int name(int fd, offset_t offset, offset_t length) {                                \
        REAL(int, #name, int, offset_t, offset_t);                                      \
        DONE_TO(fd, ALLOCATE, offset, length, real(fd, offset, length), fail_errno);    \
    }
POSIX_FALLOCATE(posix_fallocate, off_t)
POSIX_FALLOCATE(posix_fallocate64, off64_t)

#define FALLOCATE(name, offset_t)                                                       \
    int name(int fd, int mode, offset_t offset, offset_t length) {                      \
        REAL(int, #name, int, int, offset_t, offset_t);                                 \
        int op = mode == (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE) ? PUNCH : mode ? UNMODELLED : ALLOCATE; \
        DONE_TO(fd, op, offset, length, real(fd, mode, offset, length), -1); \
    }
FALLOCATE(fallocate, off_t)
FALLOCATE(fallocate64, off64_t)

#define MMAP(name, offset_t)                                                            \
    void *name(void *address, size_t length, int protection, int flags, int fd, offset_t offset) { \
        REAL(void *, #name, void *, size_t, int, int, int, offset_t);                   \
        char buffer[PATH_MAX];                                                          \
        const char *path = NULL, *last;                                                 \
        if (fd >= 0 && protection & PROT_WRITE && (flags & MAP_TYPE) != MAP_PRIVATE) path = path_of(fd, buffer); \
        if (path) { /* the first process that opens the store recreates lock.mdb */    \
            last = strrchr(path, '/');                                                  \
            pthread_mutex_lock(&lock);                                                  \
            if (strcmp(last ? last + 1 : path, "lock.mdb")) record(UNMODELLED, path, 0, 0); \
            pthread_mutex_unlock(&lock);                                                \
        }                                                                               \
        return real(address, length, protection, flags, fd, offset);                    \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

/* Names */

#define OPENED(directory, name, flags, call)                                            \
    char buffer[PATH_MAX];                                                              \
    const char *path = flags & (O_CREAT | O_TRUNC) ? path_at(directory, name, buffer) : NULL; \
    if (!path) return call;                                                             \
    pthread_mutex_lock(&lock);                                                          \
    struct stat status;                                                                 \
    int is_new = fstatat(directory, name, &status, AT_SYMLINK_NOFOLLOW) != 0;           \
    int end = is_new ? end_of(CREATE, path) : PASSES;                                   \
    int fd = end == UNDONE ? -1 : call, error = end == UNDONE ? fail_errno : errno;     \
    if (fd >= 0 && is_new) record_call(CREATE, path, 0, 0);                                  \
    else if (fd >= 0 && flags & O_TRUNC) record_call(RESIZE, path, 0, 0);                    \
    if (fd >= 0 && end == DONE) close(fd), fd = -1, error = fail_errno;                 \
    pthread_mutex_unlock(&lock);                                                        \
    errno = error;                                                                      \
    return fd

#define MODE(flags)                                                                     \
    mode_t mode = 0;                                                                    \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                \
        va_list rest;                                                                   \
        va_start(rest, flags);                                                          \
        mode = va_arg(rest, mode_t);                                                    \
        va_end(rest);                                                                   \
    }

#define OPEN(function)                                                                  \
    int function(const char *name, int flags, ...) {                                    \
        REAL(int, #function, const char *, int, ...);                                   \
        MODE(flags)                                                                     \
        OPENED(AT_FDCWD, name, flags, real(name, flags, mode));                         \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(function)                                                                \
    int function(int directory, const char *name, int flags, ...) {                     \
        REAL(int, #function, int, const char *, int, ...);                              \
        MODE(flags)                                                                     \
        OPENED(directory, name, flags, real(directory, name, flags, mode));             \
    }
OPENAT(openat)
OPENAT(openat64)

#define NAMED(op, directory, name, call)                                                \
    char buffer[PATH_MAX];                                                              \
    const char *path = path_at(directory, name, buffer);                                \
    if (!path) return call;                                                             \
    pthread_mutex_lock(&lock);                                                          \
    int end = end_of(op, path), result = end == UNDONE ? -1 : call, error = errno;      \
    if (!result) record_call(op, path, 0, 0);                                                \
    if (end == DONE) result = -1;                                                       \
    pthread_mutex_unlock(&lock);                                                        \
    errno = end == UNDONE || end == DONE ? fail_errno : error;                          \
    return result

int mkdir(const char *name, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    NAMED(MKDIR, AT_FDCWD, name, real(name, mode));
}

int mkdirat(int directory, const char *name, mode_t mode) {
    REAL(int, "mkdirat", int, const char *, mode_t);
    NAMED(MKDIR, directory, name, real(directory, name, mode));
}

int unlink(const char *name) {
    REAL(int, "unlink", const char *);
    NAMED(REMOVE, AT_FDCWD, name, real(name));
}

int unlinkat(int directory, const char *name, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    NAMED(flags ? UNMODELLED : REMOVE, directory, name, real(directory, name, flags));
}

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    NAMED(UNMODELLED, AT_FDCWD, from, real(from, to));
}

int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    REAL(int, "renameat", int, const char *, int, const char *);
    NAMED(UNMODELLED, from_directory, from, real(from_directory, from, to_directory, to));
}
