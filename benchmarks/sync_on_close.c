/* Preloaded library: a regular file that was opened for writing is synced before it is closed. It shows what a program
   that never syncs would take if it did. New names are still not synced. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

int close(int fd) {
    static int (*next)(int);
    struct stat status;
    if (!next) next = (int (*)(int))dlsym(RTLD_NEXT, "close");
    int flags = fcntl(fd, F_GETFL);
    int is_written = flags >= 0 && (flags & O_ACCMODE) != O_RDONLY;
    if (is_written && !fstat(fd, &status) && S_ISREG(status.st_mode)) fdatasync(fd);
    return next(fd);
}
