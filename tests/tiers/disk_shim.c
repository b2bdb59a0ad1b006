/* Preloaded into a test process: counts, fails, and logs the writes and syncs below one folder, LMDB's too.

   shim_start(root, fail_at, error, tear)  count from 1; operation number fail_at fails (0: none); with tear,
                                           a failing write first writes its first half
   shim_log(fd)                            append a record per operation to fd (-1: none)
   shim_stop()                             returns how many operations there were

   A record: op u32 (1 write, 2 sync), path length u32, offset u64, data length u64, covered u64 (for a sync:
   records in the log when it began), is_durable u32 (a write through an O_DSYNC descriptor), path, data. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[4096];
static int active, log_fd = -1, fail_error, tear;
static long count, fail_at;
static uint64_t records;

struct head { uint32_t op, path_len; uint64_t offset, length, covered; uint32_t durable, pad; };

void shim_start(const char *path, long at, int error, int torn)
{
    pthread_mutex_lock(&lock);
    snprintf(root, sizeof root, "%s", path);
    count = 0; fail_at = at; fail_error = error; tear = torn; active = 1; records = 0;
    pthread_mutex_unlock(&lock);
}
void shim_log(int fd) { log_fd = fd; }
long shim_stop(void) { active = 0; return count; }

static int path_of(int fd, char *out, size_t size)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, out, size - 1);
    if (length < 0) return 0;
    out[length] = 0;
    return strncmp(out, root, strlen(root)) == 0;
}

/* Returns 1 if this operation is to fail. */
static int counted(int fd)
{
    char path[4096];
    if (!active || !path_of(fd, path, sizeof path)) return 0;
    pthread_mutex_lock(&lock);
    int fails = ++count == fail_at;
    pthread_mutex_unlock(&lock);
    return fails;
}

static void put(const void *data, size_t size)
{
    while (size) {
        ssize_t done = syscall(SYS_write, log_fd, data, size);
        if (done <= 0) return;
        data = (const char *)data + done; size -= done;
    }
}

static void note(int fd, uint32_t op, const struct iovec *parts, int num, off_t offset, size_t length, uint64_t covered)
{
    char path[4096];
    if (!active || log_fd < 0 || !path_of(fd, path, sizeof path)) return;
    int flags = fcntl(fd, F_GETFL);
    struct head head = {op, strlen(path), offset, length, covered, flags >= 0 && (flags & O_DSYNC), 0};
    pthread_mutex_lock(&lock);
    put(&head, sizeof head);
    put(path, head.path_len);
    for (int i = 0; i < num && length; i++) {
        size_t part = parts[i].iov_len < length ? parts[i].iov_len : length;
        put(parts[i].iov_base, part);
        length -= part;
    }
    records++;
    pthread_mutex_unlock(&lock);
}

static ssize_t write_at(int fd, const struct iovec *parts, int num, off_t offset)
{
    if (counted(fd)) {
        if (tear && num) {
            size_t half = parts[0].iov_len / 2 / 4096 * 4096;
            if (half) syscall(SYS_pwrite64, fd, parts[0].iov_base, half, offset);
        }
        errno = fail_error;
        return -1;
    }
    ssize_t done = syscall(SYS_pwritev, fd, parts, num, (long)offset, 0L);
    if (done > 0) note(fd, 1, parts, num, offset, done, 0);
    return done;
}

ssize_t pwritev(int fd, const struct iovec *p, int n, off_t o) { return write_at(fd, p, n, o); }
ssize_t pwritev64(int fd, const struct iovec *p, int n, off64_t o) { return write_at(fd, p, n, o); }
ssize_t pwritev2(int fd, const struct iovec *p, int n, off_t o, int f) { (void)f; return write_at(fd, p, n, o); }
ssize_t pwritev64v2(int fd, const struct iovec *p, int n, off64_t o, int f) { (void)f; return write_at(fd, p, n, o); }
ssize_t pwrite(int fd, const void *b, size_t s, off_t o) { struct iovec v = {(void *)b, s}; return write_at(fd, &v, 1, o); }
ssize_t pwrite64(int fd, const void *b, size_t s, off64_t o) { struct iovec v = {(void *)b, s}; return write_at(fd, &v, 1, o); }

ssize_t write(int fd, const void *data, size_t size)
{
    off_t offset = active && fd > 2 ? lseek(fd, 0, SEEK_CUR) : -1;
    if (active && fd > 2 && counted(fd)) { errno = fail_error; return -1; }
    ssize_t done = syscall(SYS_write, fd, data, size);
    struct iovec v = {(void *)data, size};
    if (done > 0 && offset >= 0) note(fd, 1, &v, 1, offset, done, 0);
    return done;
}
ssize_t writev(int fd, const struct iovec *p, int n)
{
    off_t offset = active && fd > 2 ? lseek(fd, 0, SEEK_CUR) : -1;
    if (active && fd > 2 && counted(fd)) { errno = fail_error; return -1; }
    ssize_t done = syscall(SYS_writev, fd, p, n);
    if (done > 0 && offset >= 0) note(fd, 1, p, n, offset, done, 0);
    return done;
}
static int synced(int fd, long call)
{
    uint64_t covered = records;
    if (counted(fd)) { errno = fail_error; return -1; }
    int status = syscall(call, fd);
    if (!status) note(fd, 2, NULL, 0, 0, 0, covered);
    return status;
}
int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }
int ftruncate(int fd, off_t size)
{
    if (counted(fd)) { errno = fail_error; return -1; }
    return syscall(SYS_ftruncate, fd, size);
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
int posix_fallocate(int fd, off_t offset, off_t length)
{
    if (counted(fd)) return fail_error;
    return syscall(SYS_fallocate, fd, 0, offset, length) ? errno : 0;
}
int posix_fallocate64(int fd, off64_t offset, off64_t length) { return posix_fallocate(fd, offset, length); }
