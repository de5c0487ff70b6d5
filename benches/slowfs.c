/* A FUSE filesystem that passes everything through, 0.5 ms (or so) late: a network filesystem's round trip.
 *
 *     slowfs <source> <mount point> <microseconds>
 *
 * It speaks the kernel's protocol (linux/fuse.h) itself, for two reasons: a Python server's interpreter lock would
 * hide the parallelism that is measured, and libfuse 2 does not ask for FUSE_PARALLEL_DIROPS, without which the
 * kernel looks names of one directory up one by one. Every request sleeps once, on one of 64 threads; nothing is
 * cached (all timeouts are 0, so the kernel asks again for each name and each stat). Needs root. It is no filesystem
 * to keep things on: nodes are never forgotten, and a renamed directory is lost.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 64, BUFFER = (1 << 20) + 65536, SLOTS = 1 << 20 };

static int device;
static const char *source;
static struct timespec late;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *paths[SLOTS];    /* by node id, relative to the source: "" or "/v0/name" */
static unsigned slots[SLOTS]; /* hash table of node ids; 0 is free */
static unsigned nodes = FUSE_ROOT_ID;

static unsigned hash(const char *path) {
    unsigned h = 2166136261u;
    for (; *path; path++) h = (h ^ (unsigned char)*path) * 16777619u;
    return h % SLOTS;
}

/* The node of a path, always the same one; the caller holds the lock. */
static unsigned node_of(const char *path) {
    unsigned at = hash(path);
    while (slots[at] && strcmp(paths[slots[at]], path)) at = (at + 1) % SLOTS;
    if (!slots[at]) {
        if (nodes + 1 >= SLOTS) abort();
        if (*path) nodes++;
        slots[at] = nodes;
        paths[nodes] = strdup(path);
    }
    return slots[at];
}

/* <source><path of node>[/<name>] into `full`; returns where the path relative to the source begins in it. */
static char *full_path(char *full, unsigned long node, const char *name) {
    size_t n = strlen(source);
    memcpy(full, source, n);
    pthread_mutex_lock(&lock);
    snprintf(full + n, PATH_MAX - n, "%s%s%s", paths[node], name ? "/" : "", name ? name : "");
    pthread_mutex_unlock(&lock);
    return full + n;
}

static void reply(unsigned long unique, int error, const void *data, size_t size) {
    struct fuse_out_header head = {sizeof head + (error ? 0 : size), -error, unique};
    struct iovec parts[2] = {{&head, sizeof head}, {(void *)data, error ? 0 : size}};
    if (writev(device, parts, 2) < 0 && errno != ENOENT) perror("slowfs: reply");
}

static void fill(struct fuse_attr *a, const struct stat *s) {
    memset(a, 0, sizeof *a);
    a->ino = s->st_ino, a->size = s->st_size, a->blocks = s->st_blocks, a->mode = s->st_mode;
    a->nlink = s->st_nlink, a->uid = s->st_uid, a->gid = s->st_gid, a->blksize = s->st_blksize;
    a->atime = s->st_atim.tv_sec, a->mtime = s->st_mtim.tv_sec, a->ctime = s->st_ctim.tv_sec;
    a->atimensec = s->st_atim.tv_nsec, a->mtimensec = s->st_mtim.tv_nsec, a->ctimensec = s->st_ctim.tv_nsec;
}

static int entry(struct fuse_entry_out *out, const char *full, const char *path) {
    struct stat s;
    if (lstat(full, &s)) return errno;
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&lock);
    out->nodeid = node_of(path);
    pthread_mutex_unlock(&lock);
    fill(&out->attr, &s);
    return 0;
}

static size_t list(DIR *dir, off_t offset, char *out, size_t room) {
    size_t used = 0;
    struct dirent *e;
    if (telldir(dir) != offset) seekdir(dir, offset);
    for (off_t before = offset; (e = readdir(dir)); before = e->d_off) {
        size_t name = strlen(e->d_name), need = FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + name);
        if (used + need > room) {
            seekdir(dir, before);
            break;
        }
        struct fuse_dirent *d = (struct fuse_dirent *)(out + used);
        memset(d, 0, need);
        d->ino = e->d_ino, d->off = e->d_off, d->namelen = name, d->type = e->d_type;
        memcpy(d->name, e->d_name, name);
        used += need;
    }
    return used;
}

/* Answers one request; `out` has room for the longest answer. */
static void serve(const struct fuse_in_header *in, const void *arg, char *out) {
    char full[PATH_MAX], other[PATH_MAX], *path, *to;
    struct stat s;
    int error = 0, fd;
    size_t size = 0;
    switch (in->opcode) {
    case FUSE_LOOKUP:
        path = full_path(full, in->nodeid, arg);
        error = entry((void *)out, full, path), size = sizeof(struct fuse_entry_out);
        break;
    case FUSE_SETATTR: {
        const struct fuse_setattr_in *a = arg;
        full_path(full, in->nodeid, NULL);
        if ((a->valid & FATTR_SIZE && truncate(full, a->size)) || (a->valid & FATTR_MODE && chmod(full, a->mode)))
            error = errno;
    } /* fall through */
    case FUSE_GETATTR: {
        struct fuse_attr_out *o = memset(out, 0, sizeof *o);
        full_path(full, in->nodeid, NULL);
        if (!error && lstat(full, &s)) error = errno;
        if (!error) fill(&o->attr, &s);
        size = sizeof *o;
        break;
    }
    case FUSE_OPENDIR: {
        struct fuse_open_out *o = memset(out, 0, sizeof *o);
        full_path(full, in->nodeid, NULL);
        DIR *dir = opendir(full);
        error = dir ? 0 : errno, o->fh = (unsigned long)dir, size = sizeof *o;
        break;
    }
    case FUSE_READDIR: {
        const struct fuse_read_in *a = arg;
        size = list((DIR *)a->fh, a->offset, out, a->size);
        break;
    }
    case FUSE_RELEASEDIR:
        closedir((DIR *)((const struct fuse_release_in *)arg)->fh);
        break;
    case FUSE_OPEN: {
        struct fuse_open_out *o = memset(out, 0, sizeof *o);
        full_path(full, in->nodeid, NULL);
        fd = open(full, ((const struct fuse_open_in *)arg)->flags & ~(O_CREAT | O_EXCL | O_NOFOLLOW | O_DIRECT));
        error = fd < 0 ? errno : 0, o->fh = fd, size = sizeof *o;
        break;
    }
    case FUSE_CREATE: {
        const struct fuse_create_in *a = arg;
        struct fuse_open_out *o = memset(out + sizeof(struct fuse_entry_out), 0, sizeof *o);
        path = full_path(full, in->nodeid, (const char *)(a + 1));
        fd = open(full, a->flags | O_CREAT, a->mode);
        if (fd < 0) error = errno;
        else error = entry((void *)out, full, path);
        o->fh = fd, size = sizeof(struct fuse_entry_out) + sizeof *o;
        break;
    }
    case FUSE_READ: {
        const struct fuse_read_in *a = arg;
        ssize_t n = pread(a->fh, out, a->size, a->offset);
        error = n < 0 ? errno : 0, size = n < 0 ? 0 : n;
        break;
    }
    case FUSE_WRITE: {
        const struct fuse_write_in *a = arg;
        ssize_t n = pwrite(a->fh, a + 1, a->size, a->offset);
        struct fuse_write_out *o = memset(out, 0, sizeof *o);
        error = n < 0 ? errno : 0, o->size = n, size = sizeof *o;
        break;
    }
    case FUSE_RELEASE:
        close(((const struct fuse_release_in *)arg)->fh);
        break;
    case FUSE_FSYNC:
        if (fsync(((const struct fuse_fsync_in *)arg)->fh)) error = errno;
        break;
    case FUSE_FSYNCDIR:
        if (fsync(dirfd((DIR *)((const struct fuse_fsync_in *)arg)->fh))) error = errno;
        break;
    case FUSE_UNLINK:
    case FUSE_RMDIR:
        full_path(full, in->nodeid, arg);
        if (in->opcode == FUSE_UNLINK ? unlink(full) : rmdir(full)) error = errno;
        break;
    case FUSE_MKDIR:
        path = full_path(full, in->nodeid, (const char *)arg + sizeof(struct fuse_mkdir_in));
        error = mkdir(full, ((const struct fuse_mkdir_in *)arg)->mode) ? errno : entry((void *)out, full, path);
        size = sizeof(struct fuse_entry_out);
        break;
    case FUSE_LINK:
        full_path(full, ((const struct fuse_link_in *)arg)->oldnodeid, NULL);
        to = full_path(other, in->nodeid, (const char *)arg + sizeof(struct fuse_link_in));
        error = link(full, other) ? errno : entry((void *)out, other, to);
        size = sizeof(struct fuse_entry_out);
        break;
    case FUSE_RENAME:
    case FUSE_RENAME2: {
        int two = in->opcode == FUSE_RENAME2;
        const char *names = (const char *)arg + (two ? sizeof(struct fuse_rename2_in) : sizeof(struct fuse_rename_in));
        unsigned flags = two ? ((const struct fuse_rename2_in *)arg)->flags : 0;
        full_path(full, in->nodeid, names);
        full_path(other, ((const struct fuse_rename_in *)arg)->newdir, names + strlen(names) + 1);
        if (renameat2(AT_FDCWD, full, AT_FDCWD, other, flags)) error = errno;
        break;
    }
    case FUSE_STATFS: {
        struct statvfs v;
        struct fuse_statfs_out *o = memset(out, 0, sizeof *o);
        if (statvfs(source, &v)) error = errno;
        o->st.blocks = v.f_blocks, o->st.bfree = v.f_bfree, o->st.bavail = v.f_bavail, o->st.files = v.f_files;
        o->st.ffree = v.f_ffree, o->st.bsize = v.f_bsize, o->st.namelen = 255, o->st.frsize = v.f_frsize;
        size = sizeof *o;
        break;
    }
    default:
        error = ENOSYS;
    }
    reply(in->unique, error, out, size);
}

static void greet(const struct fuse_in_header *in, const struct fuse_init_in *a) {
    struct fuse_init_out o = {.major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION};
    o.max_readahead = a->max_readahead;
    o.flags = a->flags & (FUSE_PARALLEL_DIROPS | FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_MAX_PAGES);
    o.max_background = o.congestion_threshold = THREADS;
    o.max_write = 1 << 20, o.max_pages = 256, o.time_gran = 1;
    reply(in->unique, 0, &o, sizeof o);
}

static void *work(void *nothing) {
    char *request = malloc(BUFFER), *out = malloc(BUFFER);
    prctl(PR_SET_TIMERSLACK, 1000UL);
    for (;;) {
        ssize_t n = read(device, request, BUFFER);
        if (n < 0 && (errno == EINTR || errno == EAGAIN || errno == ENOENT)) continue;
        if (n <= 0) exit(0); /* ENODEV: unmounted */
        const struct fuse_in_header *in = (void *)request;
        switch (in->opcode) {
        case FUSE_INIT:
            greet(in, (const void *)(in + 1));
        case FUSE_FORGET:
        case FUSE_BATCH_FORGET:
        case FUSE_INTERRUPT:
            break;
        default:
            nanosleep(&late, NULL);
            serve(in, in + 1, out);
        }
    }
    return nothing;
}

int main(int count, char **arguments) {
    char options[128];
    pthread_t thread;
    if (count != 4) return 2;
    source = arguments[1];
    late.tv_nsec = 1000L * atol(arguments[3]);
    node_of("");
    device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", device);
    if (device < 0 || mount("slowfs", arguments[2], "fuse.slowfs", MS_NOSUID | MS_NODEV, options)) {
        perror("slowfs: mount");
        return 1;
    }
    for (int i = 1; i < THREADS; i++) pthread_create(&thread, NULL, work, NULL);
    work(NULL);
}
