// Runs a kernel one threadgroup at a time, every thread of it a fiber, and watches each access to memory.
// Compiled without instrumentation; the kernel is compiled with clang's load and store tracing, which calls in here.
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

namespace {

const int LANES = 32;
const size_t STACK = 128 * 1024, ARENA = 256 * 1024, GAP = 8192, THREADGROUP_LIMIT = 32 * 1024;

enum State { READY, IN_SIMD, AT_BARRIER, DONE };

// A fiber runs one thread after another, so that only its first one takes a call of the system.
struct Fiber {
    jmp_buf at;
    char* stack = nullptr;
    bool begun = false;  // whether its thread stopped at `at`, where it goes on
    State state = DONE;
    const char* operation = "";  // what it waits in, and where
    int line = 0;
    unsigned char value[16];
};

// Who touched a byte of threadgroup memory since the last barrier; NOBODY, MANY, or a thread.
const int NOBODY = -1, MANY = -2;
struct Shadow {
    bool written = false;  // ever
    int writer = NOBODY, reader = NOBODY;
};

struct Variable { int site; size_t offset, size; };

}  // namespace

// What Python passes (launch.py has the same fields).
extern "C" {
struct Buffer { char* data; uint64_t size; int32_t output; uint32_t *reads, *writes; };
struct Job {
    uint32_t threads, group_size;
    int32_t order, schedule, buffer_count;
    Buffer* buffers;
    uint64_t guard, barriers, simd_operations, threadgroup_bytes;
    int32_t errors;
    char message[512];
};
struct Position { uint32_t group, index, lane, simd_group, group_size; };
typedef void (*Kernel)(void** arguments, const Position*);
}

namespace {

Job* job;
std::vector<Fiber> fibers;
jmp_buf scheduler;
int current = -1;
std::function<void(int)> body;
unsigned char exchanged[1024 / LANES][LANES][16];
std::vector<std::vector<uint32_t>> visits;  // of each block of a text that is counted (costs.py): by thread
std::vector<uint64_t> executed;             // and by SIMD groups, which go through a block as often as their busiest lane
char* arena;
std::vector<Shadow> shadow;
std::vector<Variable> variables;

__attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
    if (job->errors++) return;  // the first one is told, all are counted
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(job->message, sizeof job->message, format, arguments);
    va_end(arguments);
}

void leave(State state) {
    Fiber& fiber = fibers[current];
    fiber.state = state;
    if (!_setjmp(fiber.at)) _longjmp(scheduler, 1);
}

// Ends a thread in the midst of the kernel.
void give_up() {
    fibers[current].begun = false;
    leave(DONE);
}

void wait(State state, const char* operation, int line) {
    fibers[current].operation = operation;
    fibers[current].line = line;
    leave(state);
}

void start() {
    for (;;) {
        body(current);
        leave(DONE);
    }
}

void resume(int thread) {
    Fiber& fiber = fibers[thread];
    current = thread;
    if (!_setjmp(scheduler)) {
        if (fiber.begun) _longjmp(fiber.at, 1);
        fiber.begun = true;
        ucontext_t first;
        getcontext(&first);
        first.uc_stack = {fiber.stack, 0, STACK};
        first.uc_link = nullptr;
        makecontext(&first, start, 0);
        setcontext(&first);
    }
    current = -1;
}

// ---- memory

void touch_threadgroup(size_t at, unsigned size, bool write) {
    bool inside = false;
    for (const Variable& v : variables) inside |= at >= v.offset && at + size <= v.offset + v.size;
    if (!inside) {
        fail("thread %d: %s of %u bytes outside threadgroup memory", current, write ? "write" : "read", size);
        give_up();
    }
    for (size_t i = at; i < at + size; i++) {
        Shadow& s = shadow[i];
        const bool other_wrote = s.writer != NOBODY && s.writer != current;
        const bool other_read = s.reader != NOBODY && s.reader != current;
        if (other_wrote || (write && other_read))
            fail("race: thread %d and thread %d on one byte of threadgroup memory without a barrier between", current,
                 other_wrote ? s.writer : s.reader);
        if (!write && !s.written) fail("thread %d reads threadgroup memory that nobody wrote", current);
        if (write) s.written = true, s.writer = current;
        else s.reader = s.reader == NOBODY || s.reader == current ? current : MANY;
    }
}

void touch_buffer(Buffer& buffer, char* address, unsigned size, bool write) {
    const char* what = write ? "write" : "read";
    const int index = int(&buffer - job->buffers);
    const long at = address - buffer.data;
    if (at < 0 || at + long(size) > long(buffer.size)) {
        fail("thread %d: out-of-bounds %s of %u bytes at byte %ld of buffer %d", current, what, size, at, index);
        give_up();
    }
    if (at % size) fail("thread %d: misaligned %s of %u bytes at byte %ld of buffer %d", current, what, size, at, index);
    if (write && !buffer.output) fail("thread %d: write to input buffer %d", current, index);
    for (unsigned i = 0; i < size; i++) (write ? buffer.writes : buffer.reads)[at + i]++;
}

void touch(void* pointer, unsigned size, bool write) {
    char* address = static_cast<char*>(pointer);
    if (current < 0) return;
    if (address >= arena && address < arena + ARENA) return touch_threadgroup(address - arena, size, write);
    static int last = 0;  // most accesses are near the one before
    const int count = job->buffer_count;
    for (int i = 0, at = last < count ? last : 0; i < count; i++, at = at + 1 < count ? at + 1 : 0) {
        Buffer& b = job->buffers[at];
        if (address >= b.data - job->guard && address < b.data + b.size + job->guard) {
            last = at;
            return touch_buffer(b, address, size, write);
        }
    }
}

// ---- one threadgroup

template <class Wanted>
int find(int from, int to, Wanted wanted) {
    for (int i = from; i < to; i++)
        if (wanted(fibers[i])) return i;
    return -1;
}

// Lets threads [from, to) go on if all of them wait in the same place. False if they do not, or none waits.
bool release(int from, int to, State state) {
    const Fiber& first = fibers[from];
    auto differs = [&](const Fiber& f) {
        return f.state != state || f.line != first.line || strcmp(f.operation, first.operation) != 0;
    };
    if (find(from, to, differs) >= 0) return false;
    for (int i = from; i < to; i++) fibers[i].state = READY;
    return true;
}

bool release_simd_group(int group, int size) {
    const int from = group * LANES, to = from + LANES < size ? from + LANES : size;
    if (!release(from, to, IN_SIMD)) return false;
    for (int i = from; i < to; i++) memcpy(exchanged[group][i - from], fibers[i].value, 16);
    job->simd_operations++;
    return true;
}

// Bytes of threadgroup memory that may have been touched.
size_t used_arena() { return variables.empty() ? 0 : variables.back().offset + variables.back().size; }

bool release_barrier(int size) {
    if (!release(0, size, AT_BARRIER)) return false;
    for (size_t i = 0; i < used_arena(); i++) shadow[i].writer = shadow[i].reader = NOBODY;
    job->barriers++;
    return true;
}

void report_divergence(int size) {
    const int waiting = find(0, size, [](const Fiber& f) { return f.state != DONE; });
    const Fiber& first = fibers[waiting];
    const int other = find(0, size, [&](const Fiber& f) { return f.state != first.state || f.line != first.line; });
    if (other < 0) return fail("divergence: a SIMD group waits in parts");
    const Fiber& second = fibers[other];
    fail("divergence: thread %d waits in %s at line %d, thread %d %s %s at line %d", waiting, first.operation, first.line,
         other, second.state == DONE ? "has ended after" : "waits in", second.operation, second.line);
}

// Threads in the order of the schedule: 0 ascending, 1 descending, any other a shuffle of that seed.
std::vector<int> schedule(int size) {
    std::vector<int> order(size);
    for (int i = 0; i < size; i++) order[i] = job->schedule == 1 ? size - 1 - i : i;
    uint32_t random = job->schedule;
    for (int i = size - 1; i > 0 && job->schedule > 1; i--) {
        random = random * 1664525u + 1013904223u;
        std::swap(order[i], order[(random >> 8) % (i + 1)]);
    }
    return order;
}

void run_threadgroup(int size) {
    const std::vector<int> order = schedule(size);
    for (int i = 0; i < size; i++) {
        Fiber& f = fibers[i];
        if (f.state != DONE) f.begun = false;  // left where another thread failed
        f.state = READY, f.operation = "nothing", f.line = 0;
    }
    for (bool moved = true; moved && !job->errors;) {
        moved = false;
        for (int i : order)
            if (fibers[i].state == READY) resume(i), moved = true;
        for (int group = 0; group * LANES < size; group++) moved |= release_simd_group(group, size);
        moved |= release_barrier(size);
    }
    const bool waiting = find(0, size, [](const Fiber& f) { return f.state != DONE; }) >= 0;
    if (waiting && !job->errors) report_divergence(size);
}

void count_visits(int size) {
    for (size_t block = 0; block < visits.size(); block++) {
        std::vector<uint32_t>& of_threads = visits[block];
        for (int from = 0; from < size; from += LANES) {
            const auto begin = of_threads.begin() + from;
            executed[block] += *std::max_element(begin, begin + std::min(LANES, size - from));
        }
        std::fill(of_threads.begin(), of_threads.end(), 0);
    }
}

void forget_threadgroup_memory() {
    if (shadow.empty()) shadow.resize(ARENA), memset(arena, 0xFF, ARENA);
    std::fill_n(shadow.begin(), used_arena(), Shadow{});
    memset(arena, 0xFF, used_arena());
    variables.clear();
}

void reserve(int size) {
    auto map = [](size_t bytes) {
        return static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    };
    if (!arena) arena = map(ARENA);
    if (int(fibers.size()) < size) fibers.resize(size);
    for (Fiber& f : fibers)
        if (!f.stack) f.stack = map(STACK);
}

}  // namespace

extern "C" {

const unsigned char (*metal_exchange(const char* operation, int line, const void* value, unsigned size))[16] {
    memcpy(fibers[current].value, value, size);
    wait(IN_SIMD, operation, line);
    return exchanged[current / LANES];
}

void metal_barrier(int line) { wait(AT_BARRIER, "threadgroup_barrier", line); }

int metal_reduction_order() { return job->order; }

int metal_lane() { return current % LANES; }

void* metal_threadgroup_memory(int site, unsigned long size) {
    size_t end = 0, used = (size + 15) / 16 * 16;
    for (const Variable& v : variables) {
        if (v.site == site) return arena + v.offset;
        end = v.offset + v.size;
        used += (v.size + 15) / 16 * 16;
    }
    const size_t offset = (end + GAP + 63) / 64 * 64;
    if (used > THREADGROUP_LIMIT) {
        fail("%zu bytes of threadgroup memory are more than %zu", used, THREADGROUP_LIMIT);
        give_up();
    }
    if (used > job->threadgroup_bytes) job->threadgroup_bytes = used;
    variables.push_back({site, offset, size});
    return arena + offset;
}

void metal_run(Job* the_job, Kernel kernel, void** arguments) {
    job = the_job;
    reserve(job->group_size);
    for (uint32_t group = 0; group * job->group_size < job->threads && !job->errors; group++) {
        const uint32_t left = job->threads - group * job->group_size;
        const uint32_t size = left < job->group_size ? left : job->group_size;
        body = [=](int i) {
            const Position position{group, uint32_t(i), uint32_t(i % LANES), uint32_t(i / LANES), job->group_size};
            kernel(arguments, &position);
        };
        forget_threadgroup_memory();
        run_threadgroup(size);
        count_visits(size);
    }
}

void metal_block(uint32_t block) {
    if (current >= 0) visits[block][current]++;
}

// Count the blocks of the kernel that runs next.
void metal_count_blocks(uint32_t blocks) {
    visits.assign(blocks, std::vector<uint32_t>(1024));
    executed.assign(blocks, 0);
}

void metal_counted_blocks(uint64_t* into) { std::copy(executed.begin(), executed.end(), into); }

void __sanitizer_cov_trace_pc_guard_init(uint32_t*, uint32_t*) {}

// What clang's instrumentation calls before each load and store, and for undefined behaviour.
#define TRACED(size)                                                        \
    void __sanitizer_cov_load##size(void* at) { touch(at, size, false); }   \
    void __sanitizer_cov_store##size(void* at) { touch(at, size, true); }
TRACED(1) TRACED(2) TRACED(4) TRACED(8) TRACED(16)
#define UNDEFINED(what) \
    void __ubsan_handle_##what##_minimal() { fail("thread %d: undefined behaviour: %s", current, #what); }
UNDEFINED(add_overflow) UNDEFINED(sub_overflow) UNDEFINED(mul_overflow) UNDEFINED(negate_overflow)
UNDEFINED(divrem_overflow) UNDEFINED(shift_out_of_bounds) UNDEFINED(out_of_bounds)
}

// Older libgcc has no conversion to bfloat16: to nearest, ties to even.
extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    const uint16_t upper = nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    __bf16 result;
    memcpy(&result, &upper, 2);
    return result;
}
