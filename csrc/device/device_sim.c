/* Principal entry points: tp_sim_device_create, sim_map, sim_copy, step_locked, tp_sim_step.
 *
 * Design note. Three tables describe memory: address ranges (one reservation each), mappings
 * (address range -> frame), frames (range of a memfd, by handle). They exist so that every
 * broken precondition of the contract is answered, not obeyed. A destroyed frame keeps its slot
 * and its range of the file and serves the next frame of the same kind and size.
 *
 * Queued work is a list of items for each stream. A step picks one item at the head of a stream
 * that may run, with a generator started from the seed, runs it with the lock released and then
 * takes it off its list:
 *
 *     QUEUED --begin_locked--> RUNNING (still the head) --finish_locked--> gone
 *
 * An event points at its latest record. A record counts the items that still have to be
 * reached: one for event_record, one on each stream with work for event_record_context. Whoever
 * waits for a record holds a reference, so a later recording of the event does not change what
 * is waited for.
 *
 * A copy that meets an address that maps nothing loses the device, as an illegal access does on
 * hardware: from then on every call about streams and events answers TP_DEVICE_ERROR.
 *
 * In the order of time (time_ordered) an item at the head of its stream is RUNNING from the moment
 * it may begin, and does what it stands for when it ends. `left` says how much of it is to be done; pass_time_locked
 * goes from one end to the next. Records and waits take no time: settle_locked passes them at once.
 *
 * Else the clock is computed when an item begins and does not influence the order in which items
 * run. An item begins at the latest of: the end of its stream's previous item, the time the
 * host had seen when it was queued, the end of what it waits for and, for a copy, the end of
 * its engine's previous copy. A fingerprint is queued like a copy and computed, of the bytes that
 * are there then, when its turn comes. */
#define _GNU_SOURCE

#include "device/device_sim.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/check.h"
#include "base/list.h"
#include "base/lock.h"

enum {
    BIN_COUNT = 256,
    SPAN_MAX = 64,
    PENDING_SCAN_MAX = 64,
    QUEUE_SOFT_MAX = 4096,
    LOOKS_MAX =
        4096, /* at events that are not complete, with nothing between, until time passes */
    POISON = 0xDB,
    POISON_CHUNK = 1 << 16,
    CODE_ILLEGAL_ADDRESS = 700, /* the codes a driver would give */
    CODE_CAPTURE_UNSUPPORTED = 900,
    CODE_CAPTURE_ISOLATION = 905
};
/* Of what mapping a frame takes. */
#define UNMAP_SHARE 0.25

/* ---- types ------------------------------------------------------------------------------- */

/* A node of a treap whose nodes are disjoint address ranges, ordered by address. */
typedef struct sim_node {
    struct sim_node *child[2];
    uint64_t priority;
    tp_addr addr;
    size_t bytes;
    uint32_t frame_idx; /* mappings only */
} sim_node;

typedef enum sim_frame_state { FRAME_FREE, FRAME_LIVE, FRAME_DYING } sim_frame_state;

typedef struct sim_frame {
    uint64_t offset; /* in the memfd of its kind */
    size_t bytes;
    uint32_t generation;
    uint32_t map_count;
    uint32_t next_free; /* index + 1 in its bin, 0: last */
    tp_frame_kind kind;
    sim_frame_state state;
} sim_frame;

typedef struct sim_file {
    int fd;
    uint64_t end;      /* size of the file */
    size_t held_bytes; /* frames that exist */
    size_t limit_bytes;
    uint32_t bins[BIN_COUNT]; /* free frames by size: index + 1 of the first */
} sim_file;

typedef struct sim_record {
    uint32_t ref_count;
    uint32_t pending_count; /* items not reached yet; 0: complete */
    double end_ns;
} sim_record;

typedef struct sim_device sim_device;

typedef struct sim_event {
    sim_device *sim;
    sim_record *latest; /* NULL: never recorded */
    bool timed;         /* the time of its record is kept, also of one that completes at once */
} sim_event;

typedef enum sim_item_kind {
    ITEM_KERNEL,
    ITEM_COPY,
    ITEM_FINGERPRINT,
    ITEM_RECORD,
    ITEM_WAIT
} sim_item_kind;

typedef struct sim_item {
    tp_link link;
    sim_item_kind kind;
    bool running;
    double queued_ns, end_ns;
    double left; /* in the order of time: bytes of a copy or fingerprint, ns of a kernel */
    sim_record *record; /* ITEM_RECORD, ITEM_WAIT: a reference */
    tp_sim_kernel *kernel;
    void *arg;
    uint64_t duration_ns;
    tp_copy_dir dir;
    tp_addr dst, src; /* of a fingerprint: src */
    size_t bytes;
    uint32_t place;
    size_t read_bytes, written_bytes; /* of a kernel, over the link */
} sim_item;

typedef struct sim_stream {
    tp_link items; /* first queued first; the first may be running */
    double time_ns;
    bool capturing;
} sim_stream;

typedef struct sim_span {
    double begin_ns, end_ns;
} sim_span;

/* A copy engine. Its spans are when it was busy, as far back as the other engine may still
 * go. */
typedef struct sim_engine {
    double free_ns;
    sim_span spans[SPAN_MAX];
    int span_count;
} sim_engine;

struct sim_device {
    tp_device base;
    tp_lock lock;
    tp_cond finished; /* an item has finished */
    tp_sim_options options;
    uint64_t order_state, treap_state;
    sim_node *ranges, *mappings;
    sim_file files[2];
    sim_frame *frames;
    uint32_t frame_count, frame_capacity;
    sim_stream **streams; /* [0] is the default stream */
    size_t stream_count, stream_capacity;
    sim_item *spare_items; /* linked through link.next */
    size_t queued_count, running_count;
    sim_engine engines[2];
    double host_ns, clock_ns;
    bool passing; /* an item is being run in the order of time, with the lock released */
    uint32_t over_link_count; /* running kernels whose operands are in host frames */
    uint32_t look_count;
    tp_fingerprint places[TP_ALL_PLACES];
    bool lost;
    tp_error lost_error;
    tp_sim_counts counts;
};

static sim_device *sim_of(tp_device *dev) { return (sim_device *)(void *)dev; }

/* splitmix64: one addition and three mixing rounds; every seed gives a full period. */
static uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static void *pointer_of(tp_addr addr) { return (void *)(uintptr_t)addr; }

/* ---- ordered ranges ---------------------------------------------------------------------- */

/* The node with the highest address below `end`. */
static sim_node *tree_last_below(sim_node *node, tp_addr end) {
    sim_node *best = NULL;
    while (node != NULL) {
        if (node->addr < end) best = node;
        node = node->child[node->addr < end];
    }
    return best;
}

static sim_node *tree_overlapping(sim_node *root, tp_addr addr, size_t bytes) {
    sim_node *node = tree_last_below(root, addr + bytes);
    return node != NULL && node->addr + node->bytes > addr ? node : NULL;
}

static sim_node *tree_find(sim_node *root, tp_addr addr) {
    return tree_overlapping(root, addr, 1);
}

static sim_node *tree_merge(sim_node *low, sim_node *high) {
    if (low == NULL) return high;
    if (high == NULL) return low;
    if (low->priority > high->priority) {
        low->child[1] = tree_merge(low->child[1], high);
        return low;
    }
    high->child[0] = tree_merge(low, high->child[0]);
    return high;
}

static void tree_split(sim_node *root, tp_addr addr, sim_node **low, sim_node **high) {
    if (root == NULL) {
        *low = *high = NULL;
    } else if (root->addr < addr) {
        tree_split(root->child[1], addr, &root->child[1], high);
        *low = root;
    } else {
        tree_split(root->child[0], addr, low, &root->child[0]);
        *high = root;
    }
}

static void tree_insert(sim_node **root, sim_node *node) {
    sim_node *low = NULL, *high = NULL;
    tree_split(*root, node->addr, &low, &high);
    *root = tree_merge(tree_merge(low, node), high);
}

static void tree_remove(sim_node **root, const sim_node *node) {
    while (*root != node) root = &(*root)->child[(*root)->addr < node->addr];
    *root = tree_merge(node->child[0], node->child[1]);
}

static sim_node *node_new(tp_addr addr, size_t bytes) {
    sim_node *node = calloc(1, sizeof *node);
    if (node != NULL) {
        node->addr = addr;
        node->bytes = bytes;
    }
    return node;
}

static void node_insert_locked(sim_device *sim, sim_node **root, sim_node *node) {
    node->priority = random_next(&sim->treap_state);
    tree_insert(root, node);
}

/* True if every byte of the range is mapped, by one mapping or several in a row. */
static bool mapped_locked(const sim_device *sim, tp_addr addr, size_t bytes) {
    const tp_addr end = addr + bytes;
    if (bytes == 0 || end < addr) return false;
    while (addr < end) {
        const sim_node *node = tree_find(sim->mappings, addr);
        if (node == NULL) return false;
        addr = node->addr + node->bytes;
    }
    return true;
}

static bool whole_granules(const sim_device *sim, uint64_t value) {
    return value != 0 && value % sim->options.granularity_bytes == 0;
}

/* ---- addresses --------------------------------------------------------------------------- */

/* Makes the range inaccessible, whatever is there now. */
static bool address_clear(tp_addr addr, size_t bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap(pointer_of(addr), bytes, PROT_NONE, flags, -1, 0) != MAP_FAILED;
}

/* Asks for one granule more than needed and gives back what sticks out on either side. */
static tp_addr address_reserve(size_t bytes, size_t granularity_bytes) {
    const size_t asked = bytes + granularity_bytes;
    if (asked < bytes) return 0;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *got = mmap(NULL, asked, PROT_NONE, flags, -1, 0);
    if (got == MAP_FAILED) return 0;
    const tp_addr begin = (tp_addr)(uintptr_t)got;
    const tp_addr addr = tp_round_up(begin, granularity_bytes);
    if (addr > begin) (void)munmap(got, addr - begin);
    const tp_addr tail = addr + bytes;
    if (tail < begin + asked) (void)munmap(pointer_of(tail), begin + asked - tail);
    return addr;
}

static tp_status sim_reserve(tp_device *dev, size_t bytes, tp_addr *out, tp_error *error) {
    sim_device *sim = sim_of(dev);
    if (!whole_granules(sim, bytes)) {
        return tp_error_set(error, TP_INVALID, "cannot reserve %zu bytes: not whole granules",
                            bytes);
    }
    const tp_addr addr = address_reserve(bytes, sim->options.granularity_bytes);
    sim_node *node = addr == 0 ? NULL : node_new(addr, bytes);
    if (node == NULL) {
        if (addr != 0) (void)munmap(pointer_of(addr), bytes);
        return tp_error_set_driver(error, TP_DEVICE_ERROR, errno, "cannot reserve %zu bytes",
                                   bytes);
    }
    tp_lock_take(&sim->lock);
    node_insert_locked(sim, &sim->ranges, node);
    sim->counts.ranges++;
    tp_lock_drop(&sim->lock);
    *out = addr;
    return TP_OK;
}

static void sim_release(tp_device *dev, tp_addr addr, size_t bytes) {
    sim_device *sim = sim_of(dev);
    tp_lock_take(&sim->lock);
    sim_node *node = tree_find(sim->ranges, addr);
    const bool whole = node != NULL && node->addr == addr && node->bytes == bytes;
    const bool empty = tree_overlapping(sim->mappings, addr, bytes) == NULL;
    TP_REQUIRE(whole && empty);
    if (whole && empty) {
        tree_remove(&sim->ranges, node);
        sim->counts.ranges--;
        (void)munmap(pointer_of(addr), bytes);
        free(node);
    }
    tp_lock_drop(&sim->lock);
}

/* ---- frames ------------------------------------------------------------------------------ */

static uint32_t *frame_bin(sim_device *sim, tp_frame_kind kind, size_t bytes) {
    return &sim->files[kind].bins[bytes / sim->options.granularity_bytes % BIN_COUNT];
}

static tp_handle handle_of(const sim_device *sim, uint32_t idx) {
    return (tp_handle)sim->frames[idx].generation << 32 | (idx + 1);
}

/* NULL unless the handle is that of a frame that exists. */
static sim_frame *frame_locked(const sim_device *sim, tp_handle handle) {
    const uint32_t idx = (uint32_t)handle - 1;
    if (idx >= sim->frame_count) return NULL;
    sim_frame *frame = &sim->frames[idx];
    return frame->state == FRAME_LIVE && handle_of(sim, idx) == handle ? frame : NULL;
}

static void frame_put_locked(sim_device *sim, uint32_t idx) {
    sim_frame *frame = &sim->frames[idx];
    uint32_t *bin = frame_bin(sim, frame->kind, frame->bytes);
    frame->state = FRAME_FREE;
    frame->next_free = *bin;
    *bin = idx + 1;
    sim->files[frame->kind].held_bytes -= frame->bytes;
}

/* A free slot whose range of the file has that size. False: there is none. */
static bool frame_take_locked(sim_device *sim, tp_frame_kind kind, size_t bytes,
                              uint32_t *out) {
    for (uint32_t *at = frame_bin(sim, kind, bytes); *at != 0;
         at = &sim->frames[*at - 1].next_free) {
        const uint32_t idx = *at - 1;
        if (sim->frames[idx].bytes != bytes) continue;
        *at = sim->frames[idx].next_free;
        *out = idx;
        return true;
    }
    return false;
}

/* A new slot, with a new range at the end of the file. */
static bool frame_grow_locked(sim_device *sim, tp_frame_kind kind, size_t bytes,
                              uint32_t *out) {
    if (sim->frame_count == sim->frame_capacity) {
        const uint32_t capacity = sim->frame_capacity == 0 ? 64 : sim->frame_capacity * 2;
        sim_frame *frames = realloc(sim->frames, capacity * sizeof *frames);
        if (frames == NULL) return false;
        sim->frames = frames;
        sim->frame_capacity = capacity;
    }
    sim_file *file = &sim->files[kind];
    if (bytes > (uint64_t)INT64_MAX - file->end) return false;
    if (!sim->options.no_payload && ftruncate(file->fd, (off_t)(file->end + bytes)) != 0) {
        return false;
    }
    const uint32_t idx = sim->frame_count++;
    sim->frames[idx] = (sim_frame){.offset = file->end, .bytes = bytes, .kind = kind};
    file->end += bytes;
    *out = idx;
    return true;
}

static tp_status frame_new_locked(sim_device *sim, tp_frame_kind kind, size_t bytes,
                                  uint32_t *out, tp_error *error) {
    sim_file *file = &sim->files[kind];
    if (bytes > tp_sub_floor(file->limit_bytes, file->held_bytes)) {
        return tp_error_set(error,
                            kind == TP_FRAME_DEVICE ? TP_OUT_OF_MEMORY : TP_NO_HOST_MEMORY,
                            "no room for a %s frame of %zu bytes: %zu of %zu in use",
                            kind == TP_FRAME_DEVICE ? "device" : "host", bytes,
                            file->held_bytes, file->limit_bytes);
    }
    uint32_t idx = 0;
    if (!frame_take_locked(sim, kind, bytes, &idx) &&
        !frame_grow_locked(sim, kind, bytes, &idx)) {
        return tp_error_set_driver(error, TP_NO_HOST_MEMORY, errno,
                                   "cannot grow the file of frames by %zu bytes", bytes);
    }
    sim->frames[idx].generation++;
    sim->frames[idx].state = FRAME_LIVE;
    file->held_bytes += bytes;
    if (kind == TP_FRAME_DEVICE) {
        sim->counts.device_frames_peak_bytes =
            tp_max_size(sim->counts.device_frames_peak_bytes, file->held_bytes);
    }
    *out = idx;
    return TP_OK;
}

/* Writes through the file, so no mapping is needed. */
static bool file_poison(int fd, uint64_t offset, size_t bytes) {
    unsigned char chunk[POISON_CHUNK];
    memset(chunk, POISON, sizeof chunk);
    while (bytes != 0) {
        const ssize_t done = pwrite(fd, chunk, tp_min_size(bytes, sizeof chunk), (off_t)offset);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return false;
        offset += (uint64_t)done;
        bytes -= (size_t)done;
    }
    return true;
}

/* Gives the OS pages back, so that an observer of the file sees its blocks go down. */
static void file_punch(int fd, uint64_t offset, size_t bytes) {
    const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    (void)fallocate(fd, mode, (off_t)offset, (off_t)bytes);
}

static tp_status sim_frame_create(tp_device *dev, tp_frame_kind kind, size_t bytes,
                                  tp_handle *out, tp_error *error) {
    sim_device *sim = sim_of(dev);
    if (!whole_granules(sim, bytes)) {
        return tp_error_set(error, TP_INVALID,
                            "cannot make a frame of %zu bytes: not whole granules", bytes);
    }
    if (kind == TP_FRAME_HOST && !sim->base.caps.host_frames) {
        return tp_error_set(error, TP_UNSUPPORTED, "this simulated device has no host frames");
    }
    uint32_t idx = 0;
    tp_lock_take(&sim->lock);
    tp_status status = frame_new_locked(sim, kind, bytes, &idx, error);
    const sim_frame frame = status == TP_OK ? sim->frames[idx] : (sim_frame){0};
    tp_lock_drop(&sim->lock);
    if (status != TP_OK) return status;

    const bool ready = !sim->options.poison || sim->options.no_payload ||
                       file_poison(sim->files[kind].fd, frame.offset, bytes);
    if (!ready) {
        status =
            tp_error_set_driver(error, TP_NO_HOST_MEMORY, errno,
                                "the machine has no memory for a frame of %zu bytes", bytes);
        file_punch(sim->files[kind].fd, frame.offset, bytes);
    }
    tp_lock_take(&sim->lock);
    if (ready) {
        sim->counts.frame_creates++;
        sim->counts.frames++;
        *out = handle_of(sim, idx);
    } else {
        frame_put_locked(sim, idx);
    }
    tp_lock_drop(&sim->lock);
    return status;
}

static void sim_frame_destroy(tp_device *dev, tp_frame_kind kind, tp_handle handle,
                              size_t bytes) {
    sim_device *sim = sim_of(dev);
    tp_lock_take(&sim->lock);
    sim_frame *frame = frame_locked(sim, handle);
    const bool unmapped =
        frame != NULL && frame->kind == kind && frame->bytes == bytes && frame->map_count == 0;
    TP_REQUIRE(unmapped);
    const uint64_t offset = unmapped ? frame->offset : 0;
    if (unmapped) frame->state = FRAME_DYING;
    tp_lock_drop(&sim->lock);
    if (!unmapped) return;

    /* The range serves nobody else until its pages are gone, and counts as held until then:
     * what an observer of the file sees never exceeds what is counted. */
    if (!sim->options.no_payload) file_punch(sim->files[kind].fd, offset, bytes);
    tp_lock_take(&sim->lock);
    frame_put_locked(sim, (uint32_t)handle - 1);
    sim->counts.frame_destroys++;
    sim->counts.frames--;
    tp_lock_drop(&sim->lock);
}

/* ---- mappings ---------------------------------------------------------------------------- */

static tp_status map_check_locked(const sim_device *sim, tp_addr addr, size_t bytes,
                                  tp_handle handle, tp_error *error) {
    const sim_frame *frame = frame_locked(sim, handle);
    if (frame == NULL || frame->bytes != bytes) {
        return tp_error_set(error, TP_INVALID, "map of %zu bytes: no frame of that size there",
                            bytes);
    }
    const sim_node *range = tree_find(sim->ranges, addr);
    if (!whole_granules(sim, addr) || range == NULL ||
        bytes > range->bytes - (addr - range->addr)) {
        return tp_error_set(error, TP_INVALID, "map at %#llx: not a reserved address range",
                            (unsigned long long)addr);
    }
    if (tree_overlapping(sim->mappings, addr, bytes) != NULL) {
        return tp_error_set(error, TP_INVALID, "map at %#llx: something is mapped there",
                            (unsigned long long)addr);
    }
    return TP_OK;
}

static void change_takes_locked(sim_device *sim, tp_frame_kind kind, size_t bytes,
                                double share);

/* Makes the frame's bytes appear at the address. False: errno says why not. */
static bool address_map(const sim_device *sim, tp_addr addr, const sim_frame *frame) {
    if (sim->options.no_payload) return true;
    const void *at =
        mmap(pointer_of(addr), frame->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
             sim->files[frame->kind].fd, (off_t)frame->offset);
    return at != MAP_FAILED;
}

static bool address_unmap(const sim_device *sim, tp_addr addr, size_t bytes) {
    return sim->options.no_payload || address_clear(addr, bytes);
}

static bool address_protect(const sim_device *sim, tp_addr addr, size_t bytes, bool readonly) {
    if (sim->options.no_payload) return true;
    return mprotect(pointer_of(addr), bytes, readonly ? PROT_READ : PROT_READ | PROT_WRITE) ==
           0;
}

static tp_status sim_map(tp_device *dev, tp_addr addr, size_t bytes, tp_handle handle,
                         tp_error *error) {
    sim_device *sim = sim_of(dev);
    sim_node *node = node_new(addr, bytes);
    if (node == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a mapping");
    tp_lock_take(&sim->lock);
    tp_status status = map_check_locked(sim, addr, bytes, handle, error);
    if (status == TP_OK) {
        sim_frame *frame = frame_locked(sim, handle);
        if (!address_map(sim, addr, frame)) {
            status = tp_error_set_driver(error, TP_DEVICE_ERROR, errno, "mmap at %#llx failed",
                                         (unsigned long long)addr);
            /* The kernel may have taken the reservation away before it failed. */
            (void)address_clear(addr, bytes);
        } else {
            frame->map_count++;
            node->frame_idx = (uint32_t)handle - 1;
            node_insert_locked(sim, &sim->mappings, node);
            sim->counts.maps++;
            sim->counts.mappings++;
            node = NULL;
            change_takes_locked(sim, frame->kind, bytes, 1);
        }
    }
    tp_lock_drop(&sim->lock);
    free(node);
    return status;
}

static bool ranges_meet(tp_addr a, size_t a_bytes, tp_addr b, size_t b_bytes) {
    return a < b + b_bytes && b < a + a_bytes;
}

/* True if a copy or a fingerprint that is running now uses the range. */
static bool range_in_copy_locked(const sim_device *sim, tp_addr addr, size_t bytes) {
    for (size_t i = 0; i < sim->stream_count; i++) {
        const tp_link *items = &sim->streams[i]->items;
        if (tp_list_empty(items)) continue;
        const sim_item *head = TP_CONTAINER(items->next, sim_item, link);
        if (!head->running) continue;
        const bool reads = head->kind == ITEM_COPY || head->kind == ITEM_FINGERPRINT;
        if ((reads && ranges_meet(addr, bytes, head->src, head->bytes)) ||
            (head->kind == ITEM_COPY && ranges_meet(addr, bytes, head->dst, head->bytes))) {
            return true;
        }
    }
    return false;
}

static tp_status sim_unmap(tp_device *dev, tp_addr addr, size_t bytes, tp_error *error) {
    sim_device *sim = sim_of(dev);
    tp_status status = TP_OK;
    tp_lock_take(&sim->lock);
    sim_node *node = tree_find(sim->mappings, addr);
    if (node == NULL || node->addr != addr || node->bytes != bytes) {
        node = NULL;
        status = tp_error_set(error, TP_INVALID, "unmap at %#llx: not one whole mapping",
                              (unsigned long long)addr);
    } else if (range_in_copy_locked(sim, addr, bytes)) {
        node = NULL;
        status = tp_error_set(error, TP_INVALID, "unmap at %#llx: a copy is running there",
                              (unsigned long long)addr);
    } else if (!address_unmap(sim, addr, bytes)) {
        node = NULL;
        status = tp_error_set_driver(error, TP_DEVICE_ERROR, errno, "unmap at %#llx failed",
                                     (unsigned long long)addr);
    } else {
        tree_remove(&sim->mappings, node);
        sim_frame *frame = &sim->frames[node->frame_idx];
        frame->map_count--;
        sim->counts.unmaps++;
        sim->counts.mappings--;
        change_takes_locked(sim, frame->kind, bytes, UNMAP_SHARE);
    }
    tp_lock_drop(&sim->lock);
    free(node);
    return status;
}

static tp_status sim_protect(tp_device *dev, tp_addr addr, size_t bytes, bool readonly,
                             tp_error *error) {
    sim_device *sim = sim_of(dev);
    tp_status status = TP_OK;
    tp_lock_take(&sim->lock);
    const sim_node *node = tree_find(sim->mappings, addr);
    if (node == NULL || node->addr != addr || node->bytes != bytes) {
        status = tp_error_set(error, TP_INVALID, "protect at %#llx: not one whole mapping",
                              (unsigned long long)addr);
    } else if (!address_protect(sim, addr, bytes, readonly)) {
        status = tp_error_set_driver(error, TP_DEVICE_ERROR, errno, "mprotect at %#llx failed",
                                     (unsigned long long)addr);
    }
    tp_lock_drop(&sim->lock);
    return status;
}

/* ---- the clock --------------------------------------------------------------------------- */

static double later(double a, double b) { return a > b ? a : b; }

/* When the copies that wait on the other engine would keep it busy, at the shared rate: a guess
 * that makes both directions pay the same for sharing, whichever runs first. */
static sim_span pending_span_locked(const sim_device *sim, tp_copy_dir dir,
                                    double shared_rate) {
    const sim_stream *stream = sim->base.copy_stream[dir];
    const double from_ns = later(sim->engines[dir].free_ns, stream->time_ns);
    sim_span span = {from_ns, from_ns};
    double bytes = 0;
    int seen = 0;
    for (const tp_link *at = stream->items.next; at != &stream->items; at = at->next) {
        const sim_item *item = TP_CONTAINER(at, sim_item, link);
        if (++seen > PENDING_SCAN_MAX || item->kind == ITEM_KERNEL) break;
        if (item->kind == ITEM_WAIT && item->record->pending_count != 0) break;
        if (item->kind != ITEM_COPY || item->running) continue;
        if (bytes == 0) span.begin_ns = later(from_ns, item->queued_ns);
        bytes += (double)item->bytes;
    }
    span.end_ns = span.begin_ns + bytes * 1e9 / shared_rate;
    return span;
}

static double copy_end_locked(const sim_device *sim, tp_copy_dir dir, double begin_ns,
                              size_t bytes) {
    const double link = (double)sim->options.link_bytes_per_s;
    const double half = (double)sim->options.duplex_bytes_per_s / 2;
    const double shared = half < link ? half : link;
    const tp_copy_dir other = dir == TP_COPY_TO_HOST ? TP_COPY_TO_DEVICE : TP_COPY_TO_HOST;
    const sim_engine *engine = &sim->engines[other];
    double left = (double)bytes;
    double now_ns = begin_ns;
    for (int i = 0; i <= engine->span_count; i++) {
        const sim_span span =
            i < engine->span_count ? engine->spans[i] : pending_span_locked(sim, other, shared);
        if (span.end_ns <= now_ns) continue;
        const double alone_ns = later(span.begin_ns, now_ns) - now_ns;
        if (left <= link * alone_ns / 1e9) break;
        left -= link * alone_ns / 1e9;
        now_ns += alone_ns;
        if (left <= shared * (span.end_ns - now_ns) / 1e9) return now_ns + left * 1e9 / shared;
        left -= shared * (span.end_ns - now_ns) / 1e9;
        now_ns = span.end_ns;
    }
    return now_ns + left * 1e9 / link;
}

/* Notes that the engine is busy, and forgets what the other engine can no longer overlap. */
static void engine_busy_locked(sim_device *sim, tp_copy_dir dir, sim_span span) {
    sim_engine *engine = &sim->engines[dir];
    const double other_free_ns = sim->engines[1 - (int)dir].free_ns;
    int gone = 0;
    while (gone < engine->span_count && engine->spans[gone].end_ns <= other_free_ns) gone++;
    engine->span_count -= gone;
    memmove(engine->spans, engine->spans + gone,
            (size_t)engine->span_count * sizeof engine->spans[0]);
    engine->free_ns = span.end_ns;
    sim_span *last = engine->span_count == 0 ? NULL : &engine->spans[engine->span_count - 1];
    if (last != NULL && (span.begin_ns <= last->end_ns || engine->span_count == SPAN_MAX)) {
        last->end_ns = span.end_ns;
    } else {
        engine->spans[engine->span_count++] = span;
    }
}

/* The virtual time at which the item ends. */
static double item_end_locked(sim_device *sim, const sim_stream *stream, const sim_item *item) {
    double begin_ns = later(stream->time_ns, item->queued_ns);
    switch (item->kind) {
    case ITEM_KERNEL: return begin_ns + (double)item->duration_ns;
    case ITEM_WAIT: return later(begin_ns, item->record->end_ns);
    case ITEM_RECORD: return begin_ns;
    case ITEM_FINGERPRINT:
        return begin_ns +
               (double)item->bytes * 1e9 / (double)sim->options.fingerprint_bytes_per_s;
    case ITEM_COPY: break;
    }
    begin_ns = later(begin_ns, sim->engines[item->dir].free_ns);
    const double end_ns = copy_end_locked(sim, item->dir, begin_ns, item->bytes);
    engine_busy_locked(sim, item->dir, (sim_span){begin_ns, end_ns});
    return end_ns;
}

/* ---- queued work ------------------------------------------------------------------------- */

static tp_status lost_status(const sim_device *sim, tp_error *error) {
    return tp_error_set_driver(error, TP_DEVICE_ERROR, sim->lost_error.driver_code, "%s",
                               sim->lost_error.message);
}

static void record_unref_locked(sim_record *record) {
    if (record != NULL && --record->ref_count == 0) free(record);
}

/* Not a stream of this device: NULL. */
static sim_stream *stream_locked(const sim_device *sim, tp_stream stream) {
    if (stream == NULL) return sim->streams[0];
    for (size_t i = 1; i < sim->stream_count; i++) {
        if (sim->streams[i] == stream) return sim->streams[i];
    }
    return NULL;
}

static sim_item *item_new_locked(sim_device *sim, sim_item_kind kind) {
    sim_item *item = sim->spare_items;
    if (item != NULL) {
        sim->spare_items = (sim_item *)(void *)item->link.next;
    } else {
        item = malloc(sizeof *item);
        if (item == NULL) return NULL;
    }
    *item = (sim_item){.kind = kind, .queued_ns = sim->host_ns};
    return item;
}

static void item_recycle_locked(sim_device *sim, sim_item *item) {
    item->link.next = (tp_link *)(void *)sim->spare_items;
    sim->spare_items = item;
}

static sim_item *head_of(const sim_stream *stream) {
    if (tp_list_empty(&stream->items)) return NULL;
    return TP_CONTAINER(stream->items.next, sim_item, link);
}

static bool runnable_locked(const sim_stream *stream) {
    const sim_item *head = head_of(stream);
    if (head == NULL || head->running) return false;
    return head->kind != ITEM_WAIT || head->record->pending_count == 0;
}

static sim_stream *pick_locked(sim_device *sim) {
    size_t count = 0;
    for (size_t i = 0; i < sim->stream_count; i++) {
        if (runnable_locked(sim->streams[i])) count++;
    }
    if (count == 0) return NULL;
    size_t skip = random_next(&sim->order_state) % count;
    for (size_t i = 0;; i++) {
        if (runnable_locked(sim->streams[i]) && skip-- == 0) return sim->streams[i];
    }
}

static void lose_locked(sim_device *sim, const sim_item *item) {
    if (sim->lost) return;
    sim->lost = true;
    if (item->kind == ITEM_FINGERPRINT) {
        (void)tp_error_set_driver(&sim->lost_error, TP_DEVICE_ERROR, CODE_ILLEGAL_ADDRESS,
                                  "a fingerprint of %zu bytes at %#llx met an unmapped address",
                                  item->bytes, (unsigned long long)item->src);
        return;
    }
    (void)tp_error_set_driver(&sim->lost_error, TP_DEVICE_ERROR, CODE_ILLEGAL_ADDRESS,
                              "a copy of %zu bytes from %#llx to %#llx met an unmapped address",
                              item->bytes, (unsigned long long)item->src,
                              (unsigned long long)item->dst);
}

static void begin_locked(sim_device *sim, sim_stream *stream, sim_item *item) {
    item->running = true;
    sim->running_count++;
    item->end_ns = item_end_locked(sim, stream, item);
    stream->time_ns = item->end_ns;
}

/* Loses the device where an item is about to use what is not mapped. */
static bool usable_locked(sim_device *sim, const sim_item *item) {
    const bool uses = item->kind == ITEM_COPY || item->kind == ITEM_FINGERPRINT;
    if (!uses) return true;
    if (mapped_locked(sim, item->src, item->bytes) &&
        (item->kind != ITEM_COPY || mapped_locked(sim, item->dst, item->bytes))) {
        return true;
    }
    lose_locked(sim, item);
    return false;
}

/* Does what the item stands for. The lock is released meanwhile. */
static void run_unlocked(sim_device *sim, sim_item *item) {
    if (!usable_locked(sim, item)) return;
    if (item->kind == ITEM_KERNEL) {
        tp_lock_drop(&sim->lock);
        item->kernel(&sim->base, item->arg);
        tp_lock_take(&sim->lock);
    } else if (sim->options.no_payload) {
        return;
    } else if (item->kind == ITEM_COPY) {
        tp_lock_drop(&sim->lock);
        memcpy(pointer_of(item->dst), pointer_of(item->src), item->bytes);
        tp_lock_take(&sim->lock);
    } else if (item->kind == ITEM_FINGERPRINT) {
        tp_lock_drop(&sim->lock);
        const tp_fingerprint found = tp_fingerprint_of(pointer_of(item->src), item->bytes);
        tp_lock_take(&sim->lock);
        sim->places[item->place] = found;
    }
}

static void finish_locked(sim_device *sim, sim_item *item) {
    if (item->kind == ITEM_COPY) {
        sim->counts.copies++;
        if (item->dir == TP_COPY_TO_HOST) {
            sim->counts.bytes_to_host += item->bytes;
        } else {
            sim->counts.bytes_to_device += item->bytes;
        }
    }
    if (item->kind == ITEM_FINGERPRINT) sim->counts.fingerprints++;
    sim->counts.read_over_link += item->read_bytes;
    sim->counts.written_over_link += item->written_bytes;
    if (item->kind == ITEM_RECORD) {
        item->record->pending_count--;
        item->record->end_ns = later(item->record->end_ns, item->end_ns);
    }
    record_unref_locked(item->record);
    sim->clock_ns = later(sim->clock_ns, item->end_ns);
    sim->running_count--;
    sim->queued_count--;
    tp_list_remove(&item->link);
    item_recycle_locked(sim, item);
}

/* Runs one item; *heavy: a kernel or a copy. False: none may run now. Releases the lock while the
 * item runs. */
static bool run_one_locked(sim_device *sim, bool *heavy) {
    sim_stream *stream = pick_locked(sim);
    if (stream == NULL) return false;
    sim_item *item = head_of(stream);
    *heavy = item->kind == ITEM_KERNEL || item->kind == ITEM_COPY;
    begin_locked(sim, stream, item);
    run_unlocked(sim, item);
    finish_locked(sim, item);
    tp_cond_broadcast(&sim->finished);
    return true;
}

/* ---- in the order of time ---------------------------------------------------------------- */

static bool over_link(const sim_item *item) {
    return item->read_bytes + item->written_bytes != 0;
}

/* How much of `left` an item that runs gets done in a nanosecond. */
static double rate_locked(const sim_device *sim, const sim_item *item) {
    if (item->kind == ITEM_KERNEL) return 1;
    if (item->kind == ITEM_FINGERPRINT) {
        return (double)sim->options.fingerprint_bytes_per_s / 1e9;
    }
    if (sim->over_link_count != 0) return 0;
    const double link = (double)sim->options.link_bytes_per_s;
    const double half = (double)sim->options.duplex_bytes_per_s / 2;
    const sim_stream *other = sim->base.copy_stream[1 - (int)item->dir];
    const sim_item *head = head_of(other);
    const bool both = head != NULL && head->running && head->kind == ITEM_COPY;
    return (both && half < link ? half : link) / 1e9;
}

/* Begins what may begin, and passes what takes no time. */
static void settle_locked(sim_device *sim) {
    for (bool passed = true; passed;) {
        passed = false;
        for (size_t i = 0; i < sim->stream_count; i++) {
            sim_stream *stream = sim->streams[i];
            while (runnable_locked(stream)) {
                sim_item *item = head_of(stream);
                item->running = true;
                stream->time_ns = item->end_ns = sim->clock_ns;
                if (item->kind == ITEM_RECORD || item->kind == ITEM_WAIT) {
                    sim->running_count++;
                    finish_locked(sim, item);
                    passed = true;
                    continue;
                }
                if (!usable_locked(sim, item)) item->bytes = 0;
                item->left = (double)(item->kind == ITEM_KERNEL ? item->duration_ns
                                                                : (uint64_t)item->bytes);
                if (over_link(item)) sim->over_link_count++;
            }
        }
    }
}

/* The stream whose item ends first, and when. NULL: nothing runs. */
static sim_stream *first_end_locked(const sim_device *sim, double *wait_ns) {
    sim_stream *first = NULL;
    for (size_t i = 0; i < sim->stream_count; i++) {
        const sim_item *item = head_of(sim->streams[i]);
        if (item == NULL || !item->running) continue;
        const double rate = rate_locked(sim, item);
        if (rate <= 0) continue;
        const double ns = item->left / rate;
        if (first != NULL && ns >= *wait_ns) continue;
        first = sim->streams[i];
        *wait_ns = ns;
    }
    return first;
}

static void get_done_locked(sim_device *sim, double ns) {
    for (size_t i = 0; i < sim->stream_count; i++) {
        sim_item *item = head_of(sim->streams[i]);
        if (item == NULL || !item->running) continue;
        item->left = later(item->left - ns * rate_locked(sim, item), 0);
    }
    sim->clock_ns += ns;
    sim->host_ns = sim->clock_ns;
}

/* Time passes until an item has ended, or by `most_ns` if none does; endless: HUGE_VAL. False: no
 * item has ended. Releases the lock while one runs. */
static bool pass_time_locked(sim_device *sim, double most_ns) {
    if (sim->passing) return false; /* on another thread */
    sim->look_count = 0;
    double wait_ns = 0;
    sim_stream *stream = first_end_locked(sim, &wait_ns);
    if (stream == NULL || wait_ns > most_ns) {
        if (most_ns < HUGE_VAL) get_done_locked(sim, most_ns);
        return false;
    }
    get_done_locked(sim, wait_ns);
    sim_item *item = head_of(stream);
    item->end_ns = stream->time_ns = sim->clock_ns;
    sim->passing = true;
    sim->running_count++;
    run_unlocked(sim, item);
    sim->passing = false;
    if (over_link(item)) sim->over_link_count--;
    finish_locked(sim, item);
    settle_locked(sim);
    tp_cond_broadcast(&sim->finished);
    return true;
}

/* The host waits while a mapping changes; `share` of what mapping it takes. Releases the lock while an
 * item runs. */
static void change_takes_locked(sim_device *sim, tp_frame_kind kind, size_t bytes,
                                double share) {
    const uint64_t ns_per_mib = kind == TP_FRAME_HOST ? sim->options.map_host_ns_per_mib
                                                      : sim->options.map_device_ns_per_mib;
    if (ns_per_mib == 0 || !sim->options.time_ordered) return;
    const double ns = share * (double)ns_per_mib * (double)bytes / (double)TP_MIB;
    const double end_ns = sim->clock_ns + ns;
    while (sim->clock_ns < end_ns && pass_time_locked(sim, end_ns - sim->clock_ns)) continue;
}

static uint64_t sim_clock(tp_device *dev) { return tp_sim_clock_ns(dev); }

static void sim_clock_advance(tp_device *dev, uint64_t most_ns) {
    sim_device *sim = sim_of(dev);
    tp_lock_take(&sim->lock);
    (void)pass_time_locked(sim, (double)most_ns);
    tp_lock_drop(&sim->lock);
}

/* ---- progress ---------------------------------------------------------------------------- */

static bool step_locked(sim_device *sim) {
    bool heavy;
    return sim->options.time_ordered ? pass_time_locked(sim, HUGE_VAL)
                                     : run_one_locked(sim, &heavy);
}

/* What a look at a record does for the device's progress: one kernel or copy, and what of markers and
 * fingerprints, which take next to no time, comes before it. */
static void progress_locked(sim_device *sim, const sim_record *record) {
    bool heavy = false;
    if (sim->options.time_ordered) {
        if (record->pending_count != 0 && ++sim->look_count > LOOKS_MAX) {
            (void)pass_time_locked(sim, HUGE_VAL);
        }
        return;
    }
    while (!heavy && record->pending_count != 0 && run_one_locked(sim, &heavy)) continue;
}

/* Reaches the records and waits at the heads of all streams. A program that records markers and
 * never asks for them would otherwise grow the queues for ever. */
static void drain_markers_locked(sim_device *sim) {
    for (size_t i = 0; i < sim->stream_count; i++) {
        sim_stream *stream = sim->streams[i];
        while (runnable_locked(stream)) {
            sim_item *item = head_of(stream);
            if (item->kind != ITEM_RECORD && item->kind != ITEM_WAIT) break;
            begin_locked(sim, stream, item);
            finish_locked(sim, item);
        }
    }
    tp_cond_broadcast(&sim->finished);
}

static void push_locked(sim_device *sim, sim_stream *stream, sim_item *item) {
    tp_list_push_back(&stream->items, &item->link);
    if (sim->options.time_ordered) {
        sim->queued_count++;
        sim->look_count = 0;
        settle_locked(sim);
        return;
    }
    if (++sim->queued_count > QUEUE_SOFT_MAX && !sim->options.manual) drain_markers_locked(sim);
}

/* Queues a new item with the values of `item`. */
static tp_status push_new_locked(sim_device *sim, sim_stream *stream, sim_item item,
                                 const char *what, tp_error *error) {
    sim_item *queued = item_new_locked(sim, item.kind);
    if (queued == NULL) {
        return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a queued %s", what);
    }
    item.queued_ns = queued->queued_ns;
    *queued = item;
    push_locked(sim, stream, queued);
    return TP_OK;
}

/* What every call that queues work checks first. */
static tp_status queue_check_locked(const sim_device *sim, const sim_stream *stream,
                                    int64_t capture_code, tp_error *error) {
    if (sim->lost) return lost_status(sim, error);
    if (stream == NULL) return tp_error_set(error, TP_INVALID, "not a stream of this device");
    if (stream->capturing) {
        return tp_error_set_driver(error, TP_DEVICE_ERROR, capture_code,
                                   "the stream is being captured");
    }
    return TP_OK;
}

static tp_status sim_copy(tp_device *dev, tp_copy_dir dir, tp_addr dst, tp_addr src,
                          size_t bytes, tp_error *error) {
    sim_device *sim = sim_of(dev);
    sim_stream *stream = sim->base.copy_stream[dir];
    tp_lock_take(&sim->lock);
    tp_status status = queue_check_locked(sim, stream, CODE_CAPTURE_UNSUPPORTED, error);
    if (status == TP_OK &&
        (!mapped_locked(sim, src, bytes) || !mapped_locked(sim, dst, bytes))) {
        status =
            tp_error_set(error, TP_INVALID, "copy of %zu bytes from %#llx to %#llx: not mapped",
                         bytes, (unsigned long long)src, (unsigned long long)dst);
    }
    if (status == TP_OK) {
        const sim_item copy = {
            .kind = ITEM_COPY, .dir = dir, .dst = dst, .src = src, .bytes = bytes};
        status = push_new_locked(sim, stream, copy, "copy", error);
    }
    tp_lock_drop(&sim->lock);
    return status;
}

static tp_status sim_fingerprint(tp_device *dev, tp_stream stream, tp_addr addr, size_t bytes,
                                 uint32_t place, tp_error *error) {
    sim_device *sim = sim_of(dev);
    if (!dev->caps.fingerprints) {
        return tp_error_set(error, TP_UNSUPPORTED, "%s", dev->caps.no_fingerprints);
    }
    tp_lock_take(&sim->lock);
    sim_stream *target = stream_locked(sim, stream);
    tp_status status = queue_check_locked(sim, target, CODE_CAPTURE_UNSUPPORTED, error);
    if (status == TP_OK && (place >= TP_ALL_PLACES || !mapped_locked(sim, addr, bytes))) {
        status =
            tp_error_set(error, TP_INVALID,
                         "fingerprint of %zu bytes at %#llx into place %u: not mapped, or no "
                         "such place",
                         bytes, (unsigned long long)addr, place);
    }
    if (status == TP_OK) {
        const sim_item fingerprint = {
            .kind = ITEM_FINGERPRINT, .src = addr, .bytes = bytes, .place = place};
        status = push_new_locked(sim, target, fingerprint, "fingerprint", error);
    }
    tp_lock_drop(&sim->lock);
    return status;
}

static tp_fingerprint sim_fingerprint_read(tp_device *dev, uint32_t place) {
    sim_device *sim = sim_of(dev);
    TP_REQUIRE(place < TP_ALL_PLACES);
    tp_lock_take(&sim->lock);
    const tp_fingerprint found = sim->places[place];
    tp_lock_drop(&sim->lock);
    return found;
}

/* ---- events ------------------------------------------------------------------------------ */

static tp_status sim_event_create(tp_device *dev, tp_event *out, tp_error *error) {
    sim_device *sim = sim_of(dev);
    sim_event *event = calloc(1, sizeof *event);
    if (event == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for an event");
    event->sim = sim;
    tp_lock_take(&sim->lock);
    sim->counts.event_creates++;
    sim->counts.events++;
    tp_lock_drop(&sim->lock);
    *out = event;
    return TP_OK;
}

static tp_status sim_event_create_timed(tp_device *dev, tp_event *out, tp_error *error) {
    const tp_status status = sim_event_create(dev, out, error);
    if (status == TP_OK) ((sim_event *)*out)->timed = true;
    return status;
}

static void sim_event_destroy(tp_device *dev, tp_event event) {
    sim_device *sim = sim_of(dev);
    sim_event *gone = event;
    TP_REQUIRE(gone != NULL && gone->sim == sim);
    tp_lock_take(&sim->lock);
    record_unref_locked(gone->latest);
    sim->counts.events--;
    tp_lock_drop(&sim->lock);
    free(gone);
}

/* Queues a record item on `stream` that counts towards `record`. False: no memory. */
static bool record_push_locked(sim_device *sim, sim_stream *stream, sim_record *record) {
    sim_item *item = item_new_locked(sim, ITEM_RECORD);
    if (item == NULL) return false;
    item->record = record;
    record->ref_count++;
    record->pending_count++;
    push_locked(sim, stream, item);
    return true;
}

static void event_set_latest_locked(sim_event *event, sim_record *record) {
    record_unref_locked(event->latest);
    event->latest = record;
}

static tp_status sim_event_record(tp_device *dev, tp_event event, tp_stream stream,
                                  tp_error *error) {
    sim_device *sim = sim_of(dev);
    sim_record *record = calloc(1, sizeof *record);
    if (record == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a record");
    record->ref_count = 1;
    tp_lock_take(&sim->lock);
    sim_stream *target = stream_locked(sim, stream);
    tp_status status = queue_check_locked(sim, target, CODE_CAPTURE_UNSUPPORTED, error);
    /* Nothing is before it: complete at once, as most markers of CPU tensors are. */
    const bool idle = status == TP_OK && !sim->options.manual && tp_list_empty(&target->items);
    if (idle) {
        record->end_ns = later(target->time_ns, sim->host_ns);
        const bool timed = ((const sim_event *)event)->timed;
        event_set_latest_locked(event, timed ? record : NULL);
        if (!timed) record_unref_locked(record);
        tp_lock_drop(&sim->lock);
        return TP_OK;
    }
    if (status == TP_OK && !record_push_locked(sim, target, record)) {
        status = tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a queued record");
    }
    if (status == TP_OK) {
        event_set_latest_locked(event, record);
    } else {
        record_unref_locked(record);
    }
    tp_lock_drop(&sim->lock);
    return status;
}

static bool any_capturing_locked(const sim_device *sim) {
    for (size_t i = 0; i < sim->stream_count; i++) {
        if (sim->streams[i]->capturing) return true;
    }
    return false;
}

/* Makes sure that `count` items can be queued without asking for memory. */
static bool items_provide_locked(sim_device *sim, size_t count) {
    const sim_item *at = sim->spare_items;
    while (at != NULL && count != 0) {
        at = (const sim_item *)(const void *)at->link.next;
        count--;
    }
    for (; count != 0; count--) {
        sim_item *item = malloc(sizeof *item);
        if (item == NULL) return false;
        item_recycle_locked(sim, item);
    }
    return true;
}

static tp_status sim_event_record_context(tp_device *dev, tp_event event, tp_error *error) {
    sim_device *sim = sim_of(dev);
    if (!sim->base.caps.context_marker) {
        return tp_error_set(error, TP_UNSUPPORTED,
                            "this simulated device has no context marker");
    }
    sim_record *record = calloc(1, sizeof *record);
    if (record == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a record");
    record->ref_count = 1;
    record->end_ns = 0;
    tp_status status = TP_OK;
    tp_lock_take(&sim->lock);
    if (sim->lost) {
        status = lost_status(sim, error);
    } else if (any_capturing_locked(sim)) {
        status = tp_error_set_driver(error, TP_DEVICE_ERROR, CODE_CAPTURE_UNSUPPORTED,
                                     "a stream is being captured");
    } else if (!items_provide_locked(sim, sim->stream_count)) {
        status = tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for queued records");
    } else {
        event_set_latest_locked(event, record);
        for (size_t i = 0; i < sim->stream_count; i++) {
            sim_stream *stream = sim->streams[i];
            record->end_ns = later(record->end_ns, stream->time_ns);
            if (head_of(stream) != NULL) (void)record_push_locked(sim, stream, record);
        }
        record = NULL;
    }
    record_unref_locked(record);
    tp_lock_drop(&sim->lock);
    return status;
}

/* The host has seen the record complete: what it queues from now on begins no earlier. */
static void host_saw_locked(sim_device *sim, const sim_record *record) {
    sim->host_ns = later(sim->host_ns, record->end_ns);
}

static tp_status sim_event_query(tp_device *dev, tp_event event, bool *done, tp_error *error) {
    sim_device *sim = sim_of(dev);
    const sim_event *asked = event;
    tp_status status = TP_OK;
    tp_lock_take(&sim->lock);
    sim_record *record = asked->latest;
    if (record != NULL) record->ref_count++;
    if (record != NULL && !sim->options.manual) progress_locked(sim, record);
    if (sim->lost) {
        status = lost_status(sim, error);
    } else {
        *done = record == NULL || record->pending_count == 0;
        if (*done && record != NULL) host_saw_locked(sim, record);
    }
    record_unref_locked(record);
    tp_lock_drop(&sim->lock);
    return status;
}

static tp_status sim_event_elapsed(tp_device *dev, tp_event from, tp_event to, uint64_t *ns,
                                   tp_error *error) {
    sim_device *sim = sim_of(dev);
    const sim_event *first = from, *second = to;
    tp_lock_take(&sim->lock);
    const sim_record *begin = first->latest, *end = second->latest;
    const bool known = first->timed && second->timed && begin != NULL && end != NULL &&
                       begin->pending_count == 0 && end->pending_count == 0;
    if (known) *ns = end->end_ns > begin->end_ns ? (uint64_t)(end->end_ns - begin->end_ns) : 0;
    tp_lock_drop(&sim->lock);
    return known ? TP_OK : tp_error_set(error, TP_INVALID, "events that are not complete");
}

static tp_status sim_event_sync(tp_device *dev, tp_event event, tp_error *error) {
    sim_device *sim = sim_of(dev);
    const sim_event *asked = event;
    tp_status status = TP_OK;
    tp_lock_take(&sim->lock);
    sim_record *record = asked->latest;
    if (record != NULL) {
        record->ref_count++;
        while (record->pending_count != 0 && !sim->lost) {
            if (step_locked(sim)) continue;
            /* What is left is being run by other threads. */
            TP_ASSERT(sim->running_count != 0);
            (void)tp_cond_wait(&sim->finished, &sim->lock, 0);
        }
        host_saw_locked(sim, record);
        record_unref_locked(record);
    }
    if (sim->lost) status = lost_status(sim, error);
    tp_lock_drop(&sim->lock);
    return status;
}

static tp_status sim_stream_wait(tp_device *dev, tp_stream stream, tp_event event,
                                 tp_error *error) {
    sim_device *sim = sim_of(dev);
    const sim_event *awaited = event;
    tp_lock_take(&sim->lock);
    sim_stream *target = stream_locked(sim, stream);
    tp_status status = queue_check_locked(sim, target, CODE_CAPTURE_ISOLATION, error);
    if (status == TP_OK && awaited->latest != NULL) {
        sim_item *item = item_new_locked(sim, ITEM_WAIT);
        if (item == NULL) {
            status = tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a queued wait");
        } else {
            item->record = awaited->latest;
            item->record->ref_count++;
            push_locked(sim, target, item);
        }
    }
    tp_lock_drop(&sim->lock);
    return status;
}

static tp_status sim_stream_capturing(tp_device *dev, tp_stream stream, bool *capturing,
                                      tp_error *error) {
    sim_device *sim = sim_of(dev);
    tp_lock_take(&sim->lock);
    const sim_stream *asked = stream_locked(sim, stream);
    if (asked != NULL) *capturing = asked->capturing;
    tp_lock_drop(&sim->lock);
    if (asked == NULL) return tp_error_set(error, TP_INVALID, "not a stream of this device");
    return TP_OK;
}

/* ---- life -------------------------------------------------------------------------------- */

static tp_status sim_bind_thread(tp_device *dev, tp_error *error) {
    (void)dev;
    (void)error;
    return TP_OK;
}

static tp_status sim_memory_info(tp_device *dev, size_t *free_bytes, size_t *total_bytes,
                                 tp_error *error) {
    (void)error;
    sim_device *sim = sim_of(dev);
    tp_lock_take(&sim->lock);
    const sim_file *file = &sim->files[TP_FRAME_DEVICE];
    *free_bytes = file->limit_bytes - file->held_bytes;
    *total_bytes = file->limit_bytes;
    tp_lock_drop(&sim->lock);
    return TP_OK;
}

static tp_status stream_new(sim_device *sim, sim_stream **out, tp_error *error) {
    sim_stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a stream");
    tp_list_init(&stream->items);
    tp_lock_take(&sim->lock);
    bool room = sim->stream_count < sim->stream_capacity;
    if (!room) {
        const size_t capacity = sim->stream_capacity * 2 + 8;
        sim_stream **streams = realloc(sim->streams, capacity * sizeof *streams);
        if (streams != NULL) {
            sim->streams = streams;
            sim->stream_capacity = capacity;
            room = true;
        }
    }
    if (room) sim->streams[sim->stream_count++] = stream;
    tp_lock_drop(&sim->lock);
    if (!room) {
        free(stream);
        return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a stream");
    }
    *out = stream;
    return TP_OK;
}

/* Drops what is queued and never ran. */
static void stream_free(sim_stream *stream) {
    while (!tp_list_empty(&stream->items)) {
        sim_item *item = TP_CONTAINER(stream->items.next, sim_item, link);
        tp_list_remove(&item->link);
        record_unref_locked(item->record);
        free(item);
    }
    free(stream);
}

static void tree_free(sim_node *node, bool unmap) {
    if (node == NULL) return;
    tree_free(node->child[0], unmap);
    tree_free(node->child[1], unmap);
    if (unmap) (void)munmap(pointer_of(node->addr), node->bytes);
    free(node);
}

static void device_free(sim_device *sim) {
    for (size_t i = 0; i < sim->stream_count; i++) stream_free(sim->streams[i]);
    free(sim->streams);
    while (sim->spare_items != NULL) {
        sim_item *item = sim->spare_items;
        sim->spare_items = (sim_item *)(void *)item->link.next;
        free(item);
    }
    tree_free(sim->mappings, false);
    tree_free(sim->ranges, true);
    free(sim->frames);
    for (int kind = 0; kind < 2; kind++) {
        if (sim->files[kind].fd >= 0) (void)close(sim->files[kind].fd);
    }
    free(sim);
}

static void sim_destroy(tp_device *dev) {
    sim_device *sim = sim_of(dev);
    TP_REQUIRE(sim->running_count == 0);
    TP_REQUIRE(sim->counts.ranges == 0 && sim->counts.mappings == 0);
    TP_REQUIRE(sim->counts.frames == 0 && sim->counts.events == 0);
    tp_cond_fini(&sim->finished);
    tp_lock_fini(&sim->lock);
    device_free(sim);
}

/* Frames are shared memory: without this, parent and child would write to the same tensors. */
static void sim_make_private(tp_device *dev, tp_addr addr, size_t bytes, tp_addr from) {
    if (sim_of(dev)->options.no_payload) return;
    void *copy = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) return; /* out of memory: shared, as before */
    memcpy(copy, (const void *)(uintptr_t)from, bytes);
    if (mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)(uintptr_t)addr) ==
        MAP_FAILED) {
        (void)munmap(copy, bytes);
    }
}

static const tp_device_ops sim_ops = {
    .destroy = sim_destroy,
    .bind_thread = sim_bind_thread,
    .reserve = sim_reserve,
    .release = sim_release,
    .frame_create = sim_frame_create,
    .frame_destroy = sim_frame_destroy,
    .map = sim_map,
    .unmap = sim_unmap,
    .protect = sim_protect,
    .copy = sim_copy,
    .fingerprint = sim_fingerprint,
    .fingerprint_read = sim_fingerprint_read,
    .event_create = sim_event_create,
    .event_destroy = sim_event_destroy,
    .make_private = sim_make_private,
    .event_create_timed = sim_event_create_timed,
    .event_elapsed = sim_event_elapsed,
    .event_record = sim_event_record,
    .event_record_context = sim_event_record_context,
    .event_query = sim_event_query,
    .event_sync = sim_event_sync,
    .stream_wait = sim_stream_wait,
    .stream_capturing = sim_stream_capturing,
    .memory_info = sim_memory_info,
    .clock_ns = sim_clock,
    .clock_advance = sim_clock_advance,
};

static tp_status options_check(const tp_sim_options *options, tp_error *error) {
    const long os_page = sysconf(_SC_PAGESIZE);
    const size_t granularity = options->granularity_bytes;
    if (!tp_is_power_of_two(granularity) || os_page <= 0 || granularity < (size_t)os_page) {
        return tp_error_set(
            error, TP_INVALID,
            "a granularity of %zu bytes is not a power of two of at least one OS "
            "page",
            granularity);
    }
    if (options->device_bytes < granularity) {
        return tp_error_set(error, TP_INVALID, "a device of %zu bytes holds no frame",
                            options->device_bytes);
    }
    if (options->manual && options->time_ordered) {
        return tp_error_set(error, TP_INVALID, "in the order of time nothing is run by hand");
    }
    return TP_OK;
}

static tp_status files_open(sim_device *sim, tp_error *error) {
    static const char *const names[2] = {
        [TP_FRAME_DEVICE] = "torchpager-device", [TP_FRAME_HOST] = "torchpager-host"};
    for (int kind = 0; kind < 2 && !sim->options.no_payload; kind++) {
        sim->files[kind].fd = memfd_create(names[kind], MFD_CLOEXEC);
        if (sim->files[kind].fd < 0) {
            return tp_error_set_driver(error, TP_UNSUPPORTED, errno, "memfd_create failed");
        }
    }
    sim->files[TP_FRAME_DEVICE].limit_bytes = sim->options.device_bytes;
    sim->files[TP_FRAME_HOST].limit_bytes =
        sim->options.host_bytes == 0 ? SIZE_MAX : sim->options.host_bytes;
    return TP_OK;
}

static void device_describe(sim_device *sim, const tp_sim_options *options) {
    sim->options = *options;
    if (options->link_bytes_per_s == 0) sim->options.link_bytes_per_s = 55000000000u;
    if (options->duplex_bytes_per_s == 0) {
        sim->options.duplex_bytes_per_s = sim->options.link_bytes_per_s / 55 * 101;
    }
    if (options->fingerprint_bytes_per_s == 0) {
        sim->options.fingerprint_bytes_per_s = 2000000000000u;
    }
    sim->order_state = options->seed;
    sim->treap_state = 1;
    sim->base.ops = &sim_ops;
    sim->base.caps = (tp_device_caps){
        .link_bytes_per_s = sim->options.link_bytes_per_s,
        .link_both_bytes_per_s = sim->options.duplex_bytes_per_s,
        .name = "sim",
        .granularity_bytes = options->granularity_bytes,
        .total_bytes = options->device_bytes,
        .host_frames = !options->no_host_frames,
        .shared_frames = true,
        .context_marker = !options->no_context_marker,
        .virtual_clock = options->time_ordered,
        .fingerprints = !options->no_fingerprints,
        .no_fingerprints = options->no_fingerprints ? "this simulated device has none" : ""};
    sim->files[0].fd = sim->files[1].fd = -1;
}

static tp_status streams_open(sim_device *sim, tp_error *error) {
    /* The default one, one for each direction, two for fingerprints. */
    sim_stream *streams[5] = {NULL, NULL, NULL, NULL, NULL};
    for (int i = 0; i < 5; i++) {
        const tp_status status = stream_new(sim, &streams[i], error);
        if (status != TP_OK) return status;
    }
    sim->base.copy_stream[TP_COPY_TO_HOST] = streams[1];
    sim->base.copy_stream[TP_COPY_TO_DEVICE] = streams[2];
    sim->base.check_stream = streams[3];
    sim->base.print_stream = streams[4];
    return TP_OK;
}

tp_status tp_sim_device_create(const tp_sim_options *options, tp_device **out,
                               tp_error *error) {
    tp_status status = options_check(options, error);
    if (status != TP_OK) return status;
    sim_device *sim = calloc(1, sizeof *sim);
    if (sim == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a device");
    device_describe(sim, options);
    status = tp_lock_init(&sim->lock, TP_RANK_DEVICE, error);
    if (status != TP_OK) goto fail_lock;
    status = tp_cond_init(&sim->finished, error);
    if (status != TP_OK) goto fail_cond;
    status = files_open(sim, error);
    if (status != TP_OK) goto fail_parts;
    status = streams_open(sim, error);
    if (status != TP_OK) goto fail_parts;
    *out = &sim->base;
    return TP_OK;

fail_parts:
    tp_cond_fini(&sim->finished);
fail_cond:
    tp_lock_fini(&sim->lock);
fail_lock:
    device_free(sim);
    return status;
}

/* ---- for tests and replay ---------------------------------------------------------------- */

tp_status tp_sim_stream_create(tp_device *dev, tp_stream *out, tp_error *error) {
    sim_stream *stream = NULL;
    const tp_status status = stream_new(sim_of(dev), &stream, error);
    if (status == TP_OK) *out = stream;
    return status;
}

tp_status tp_sim_launch(tp_device *dev, tp_stream stream, tp_sim_kernel *kernel, void *arg,
                        uint64_t duration_ns, tp_error *error) {
    sim_device *sim = sim_of(dev);
    tp_lock_take(&sim->lock);
    sim_stream *target = stream_locked(sim, stream);
    tp_status status = queue_check_locked(sim, target, CODE_CAPTURE_UNSUPPORTED, error);
    if (status == TP_OK) {
        const sim_item launch = {
            .kind = ITEM_KERNEL, .kernel = kernel, .arg = arg, .duration_ns = duration_ns};
        status = push_new_locked(sim, target, launch, "kernel", error);
    }
    tp_lock_drop(&sim->lock);
    return status;
}

/* What the link takes for the bytes of one kernel. */
static double link_ns(const sim_device *sim, size_t read_bytes, size_t written_bytes) {
    const double link = (double)sim->options.link_bytes_per_s;
    const double half = (double)sim->options.duplex_bytes_per_s / 2;
    const bool both = read_bytes != 0 && written_bytes != 0;
    const double rate = both && half < link ? half : link;
    return (double)tp_max_size(read_bytes, written_bytes) * 1e9 / rate;
}

tp_status tp_sim_launch_over_link(tp_device *dev, tp_stream stream, tp_sim_kernel *kernel,
                                  void *arg, uint64_t duration_ns, size_t read_bytes,
                                  size_t written_bytes, tp_error *error) {
    sim_device *sim = sim_of(dev);
    if (!sim->options.time_ordered) {
        return tp_error_set(error, TP_UNSUPPORTED, "this device does not go by time");
    }
    const uint64_t on_link_ns = (uint64_t)(link_ns(sim, read_bytes, written_bytes) + 0.5);
    tp_lock_take(&sim->lock);
    sim_stream *target = stream_locked(sim, stream);
    tp_status status = queue_check_locked(sim, target, CODE_CAPTURE_UNSUPPORTED, error);
    if (status == TP_OK) {
        const sim_item launch = {.kind = ITEM_KERNEL,
                                 .kernel = kernel,
                                 .arg = arg,
                                 .duration_ns =
                                     duration_ns > on_link_ns ? duration_ns : on_link_ns,
                                 .read_bytes = read_bytes,
                                 .written_bytes = written_bytes};
        status = push_new_locked(sim, target, launch, "kernel", error);
    }
    tp_lock_drop(&sim->lock);
    return status;
}

bool tp_sim_step(tp_device *dev) {
    sim_device *sim = sim_of(dev);
    tp_lock_take(&sim->lock);
    const bool ran = step_locked(sim);
    tp_lock_drop(&sim->lock);
    return ran;
}

void tp_sim_set_capturing(tp_device *dev, tp_stream stream, bool capturing) {
    sim_device *sim = sim_of(dev);
    tp_lock_take(&sim->lock);
    sim_stream *target = stream_locked(sim, stream);
    TP_REQUIRE(target != NULL);
    if (target != NULL) target->capturing = capturing;
    tp_lock_drop(&sim->lock);
}

/* The lock is held during the access, so that no other thread can take the mapping away. */
bool tp_sim_read(tp_device *dev, tp_addr addr, void *out, size_t bytes) {
    sim_device *sim = sim_of(dev);
    tp_lock_take(&sim->lock);
    const bool mapped = mapped_locked(sim, addr, bytes);
    if (mapped && sim->options.no_payload) {
        memset(out, 0, bytes);
    } else if (mapped) {
        memcpy(out, pointer_of(addr), bytes);
    }
    tp_lock_drop(&sim->lock);
    return mapped;
}

bool tp_sim_write(tp_device *dev, tp_addr addr, const void *data, size_t bytes) {
    sim_device *sim = sim_of(dev);
    tp_lock_take(&sim->lock);
    const bool mapped = mapped_locked(sim, addr, bytes);
    if (mapped && !sim->options.no_payload) memcpy(pointer_of(addr), data, bytes);
    tp_lock_drop(&sim->lock);
    return mapped;
}

bool tp_sim_mapped(tp_device *dev, tp_addr addr, size_t bytes) {
    sim_device *sim = sim_of(dev);
    tp_lock_take(&sim->lock);
    const bool mapped = mapped_locked(sim, addr, bytes);
    tp_lock_drop(&sim->lock);
    return mapped;
}

uint64_t tp_sim_clock_ns(tp_device *dev) {
    sim_device *sim = sim_of(dev);
    tp_lock_take(&sim->lock);
    const double clock_ns = sim->clock_ns;
    tp_lock_drop(&sim->lock);
    return (uint64_t)(clock_ns + 0.5);
}

void tp_sim_get_counts(tp_device *dev, tp_sim_counts *out) {
    sim_device *sim = sim_of(dev);
    tp_lock_take(&sim->lock);
    *out = sim->counts;
    out->device_frames_bytes = sim->files[TP_FRAME_DEVICE].held_bytes;
    out->host_frames_bytes = sim->files[TP_FRAME_HOST].held_bytes;
    tp_lock_drop(&sim->lock);
}

int tp_sim_fd(tp_device *dev, tp_frame_kind kind) { return sim_of(dev)->files[kind].fd; }
