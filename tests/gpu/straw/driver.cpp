// A driver of straw: the functions of libcudart.so.13 and libcuda.so.1 that TVM's CUDA runtime calls, over host memory.
//
// Work is late. A copy or a launch goes into the queue of its stream, and is done when that stream, an event behind it
// or its device is waited for, and not before. So a result that is read without a wait is never there. Streams run in
// no order but that which events and the default stream give.
//
// With STRAW_SHARED, a folder, processes see each other's memory on a device, as they do on a GPU.
//
// Memory has poison in it (0xff, which is NaN in every float; the largest blocks only at their start), a page without access behind it, and a pattern in the
// rest of its pages. Freed memory has no access. Kernels are those of a shared library (the "cubin"), which has a table
// of them; an access outside of all memory ends the kernel, as on a GPU.
//
// A stream that is captured does nothing: what it is told becomes the nodes of a graph, with the memory that they touch. A graph is launched as one task.
// It notices memory that has become another block since. During a capture its thread may neither wait for the device nor allocate: that ends the capture
// with an error, which a program may go on from, and which is no line of the report.
//
// Everything that is wrong is a line of the report, and the error of this and all further calls.
//
// Built twice: as libcudart.so.13 with the state, and with STRAW_DRIVER as libcuda.so.1, linked with the first.
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

struct CUlaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};
struct KernelRow {  // as tests/oracles/cuda/threads.py writes it
  const char* name;
  void (*run)(void**);
  int together, threads, shared;
  const int* parameters;  // sizes, those of pointers negative, 0 at the end
};
typedef void (*LaunchBlocks)(void (*)(void**), void**, int, int, int);
enum { OK = 0, INVALID_VALUE = 1, NO_MEMORY = 2, BAD_HANDLE = 400, NOT_READY = 600, ILLEGAL_ADDRESS = 700, UNSUPPORTED = 801,
  NOT_IN_CAPTURE = 900, BROKEN_CAPTURE = 901 };

struct CHandle { char bytes[64]; };

extern "C" {
int straw_fault(int code, const char* kind, const char* text);
int straw_launch(const KernelRow* row, LaunchBlocks launch, int home, const CUlaunchConfig* config, void** values);
int straw_forget(int home);
int cudaGetLastError();
const char* straw_last();
int cudaGetDevice(int* device);
}

#ifndef STRAW_DRIVER

#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <functional>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {
const size_t PAGE = 4096, BOUNDARY = 256;
size_t capacity() { const char* n = getenv("STRAW_MEMORY"); return n ? strtoull(n, nullptr, 10) : size_t(1) << 32; }
const size_t CAPACITY = capacity();
const size_t LARGEST_POISONED = size_t(256) << 20, TOLD = size_t(1) << 20;
const unsigned char POISON = 0xff, PATTERN = 0xa5;

struct Stream;
struct Mark { Stream* stream; uint64_t position; };
struct Task { std::string what; std::vector<Mark> waits; std::function<void()> run; std::vector<void*> touched; };
struct Node { std::string what; std::function<void()> run; std::vector<std::pair<void*, uint64_t>> touched; };
struct Capture { long thread; std::string broken; std::vector<Node> nodes; };
typedef std::shared_ptr<std::vector<Node>> Nodes;
struct Stream {
  int device;
  bool blocking, is_default;
  uint64_t queued = 0, done = 0;
  bool running = false;
  std::deque<Task> tasks;
  std::unique_ptr<Capture> capture;
};
struct Block { char *map, *base; size_t mapped, size; int device; uint64_t number; };  // device -1: pinned host memory, which
// is the caller's where nothing is mapped
// How often an event of two processes was recorded, got to, and which time of these the other process waits for.
struct SharedMark { std::atomic<uint64_t> recorded, done, wanted; };
struct Event {
  Mark mark{nullptr, 0};
  std::shared_ptr<double> at;  // when the device got there, in milliseconds
  SharedMark* shared = nullptr;
  bool is_own = true;
  int file = -1;
  std::map<uint64_t, Mark> marks;
};
struct Handle { int process, file, device; size_t offset, size, mapped; };

std::recursive_mutex guard;
std::map<char*, Block> live;
std::map<char*, Block> freed;
std::deque<char*> quarantine;
std::set<Stream*> streams;
std::set<Event*> events;
std::map<int, Stream*> defaults;
std::vector<std::string> report;
std::string last;
int sticky = OK;
uint64_t allocations = 0, waits_done = 0, tasks_done = 0;
uint64_t waits_of_main = 0;  // waits of the process's first thread
uint64_t orders_of_main = 0, graphs_done = 0, nodes_done = 0;  // what the first thread told streams; graphs, and what they did
std::map<int, size_t> used;
thread_local int current = 0;
thread_local int recent = OK;

int device_count() { const char* n = getenv("STRAW_DEVICES"); return n ? atoi(n) : 1; }
int capability() { const char* n = getenv("STRAW_CAPABILITY"); return n ? atoi(n) : 90; }

bool is_fault(const char* name) { const char* wrong = getenv("STRAW_FAULT"); return wrong && !strcmp(wrong, name); }

void log_line(const std::string& line) {
  const char* path = getenv("STRAW_LOG");
  FILE* file = path ? fopen(path, "a") : nullptr;
  if (!file) return;
  fprintf(file, "%s\n", line.c_str());
  fclose(file);
}
std::string spelled(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string spelled(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}
int fault(int code, const char* kind, const std::string& text) { return straw_fault(code, kind, text.c_str()); }

int refuse(const std::string& text) { last = "capture: " + text; return recent = NOT_IN_CAPTURE; }
// An error for what may not be done while this thread captures a stream, which breaks that capture.
int breaks_capture(const char* what) {
  for (Stream* stream : streams)
    if (stream->capture && stream->capture->thread == syscall(SYS_gettid)) {
      stream->capture->broken = spelled("%s during a capture", what);
      return refuse(stream->capture->broken);
    }
  return OK;
}

Block* block_of(const void* address) {
  auto after = live.upper_bound((char*)address);
  if (after == live.begin()) return nullptr;
  Block& block = std::prev(after)->second;
  return (char*)address < block.base + block.size || (char*)address == block.base ? &block : nullptr;
}
std::string place_of(const void* address) {
  if (Block* block = block_of(address))
    return spelled("block %lu of %zu bytes on device %d", block->number, block->size, block->device);
  for (auto& [_, block] : freed)
    if ((char*)address >= block.map && (char*)address < block.map + block.mapped)
      return spelled("block %lu of %zu bytes, which was freed", block.number, block.size);
  for (auto& [_, block] : live)
    if ((char*)address >= block.map && (char*)address < block.map + block.mapped)
      return spelled("%ld bytes from the start of block %lu of %zu bytes", long((char*)address - block.base),
                     block.number, block.size);
  return "no block";
}
// The range must lie in one live block of a device; -1 stands for pinned memory.
bool inside(const char* what, const void* address, size_t size, int device) {
  Block* block = block_of(address);
  if (!block || block->device != device) {
    fault(ILLEGAL_ADDRESS, block ? "device" : "pointer",
          spelled("%s: address %p is in %s, not on device %d", what, address, place_of(address).c_str(), device));
    return false;
  }
  if ((char*)address + size > block->base + block->size) {
    fault(ILLEGAL_ADDRESS, "range", spelled("%s: %zu bytes from %p end outside of %s", what, size, address,
                                            place_of(address).c_str()));
    return false;
  }
  return true;
}
bool is_whole(const Block& block) {
  if (!block.mapped) return true;
  for (char* p = block.map + PAGE; p < block.base; p++) if ((unsigned char)*p != PATTERN) return false;
  for (char* p = block.base + block.size; p < block.map + block.mapped - PAGE; p++)
    if ((unsigned char)*p != PATTERN) return false;
  return true;
}
void look_around(const Block& block, const char* what) {
  if (is_whole(block)) return;
  fault(ILLEGAL_ADDRESS, "overrun", spelled("%s: bytes around block %lu of %zu bytes were written", what, block.number,
                                            block.size));
  memset(block.map + PAGE, PATTERN, block.base - block.map - PAGE);
  memset(block.base + block.size, PATTERN, block.map + block.mapped - PAGE - block.base - block.size);
}

// Bytes that other processes have told of, each in a file of its number and device.
size_t used_elsewhere(int device) {
  const char* folder = getenv("STRAW_SHARED");
  DIR* files = folder ? opendir(folder) : nullptr;
  size_t all = 0;
  while (dirent* file = files ? readdir(files) : nullptr) {
    int process, other;
    size_t bytes = 0;
    if (sscanf(file->d_name, "%d-%d", &process, &other) != 2 || other != device || process == getpid()) continue;
    if (kill(process, 0)) continue;
    FILE* text = fopen((std::string(folder) + "/" + file->d_name).c_str(), "r");
    if (text && fscanf(text, "%zu", &bytes) == 1) all += bytes;
    if (text) fclose(text);
  }
  if (files) closedir(files);
  return all;
}
void tell_used(int device) {
  static std::map<int, size_t> told;
  const char* folder = getenv("STRAW_SHARED");
  if (!folder || device < 0 || used[device] / TOLD == told[device] / TOLD) return;
  FILE* text = fopen(spelled("%s/%d-%d", folder, getpid(), device).c_str(), "w");
  if (text) { fprintf(text, "%zu", told[device] = used[device]); fclose(text); }
}

int allocate(void** out, size_t size, int device) {
  *out = nullptr;
  if (device >= 0 && used[device] + used_elsewhere(device) + size > CAPACITY) return recent = NO_MEMORY;
  size_t whole = (size + BOUNDARY - 1) / BOUNDARY * BOUNDARY;
  if (!whole) whole = BOUNDARY;
  size_t mapped = (whole + PAGE - 1) / PAGE * PAGE + 2 * PAGE;
  void* map = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return recent = NO_MEMORY;
  mprotect(map, PAGE, PROT_NONE);
  mprotect((char*)map + mapped - PAGE, PAGE, PROT_NONE);
  Block block{(char*)map, (char*)map + mapped - PAGE - whole, mapped, size, device, allocations++};
  memset((char*)map + PAGE, PATTERN, block.base - (char*)map - PAGE);
  memset(block.base + size, PATTERN, mapped - PAGE - (block.base - (char*)map) - size);
  memset(block.base, POISON, std::min(size, LARGEST_POISONED));
  live[block.base] = block;
  used[device] += size;
  tell_used(device);
  *out = block.base;
  return OK;
}
int release(void* address, bool pinned, const char* what) {
  if (!address) return OK;
  auto at = live.find((char*)address);
  if (at == live.end() || (at->second.device < 0) != pinned || !at->second.mapped) {
    bool twice = at == live.end() && freed.count((char*)address);
    return fault(INVALID_VALUE, twice ? "double free" : "bad free",
                 spelled("%s of %p, %s", what, address, place_of(address).c_str()));
  }
  Block block = at->second;
  look_around(block, what);
  live.erase(at);
  used[block.device] -= block.size;
  tell_used(block.device);
  mprotect(block.map, block.mapped, PROT_NONE);
  madvise(block.map, block.mapped, MADV_DONTNEED);
  freed[block.base] = block;
  quarantine.push_back(block.base);
  if (quarantine.size() > 2048) {
    Block& oldest = freed[quarantine.front()];
    munmap(oldest.map, oldest.mapped);
    freed.erase(quarantine.front());
    quarantine.pop_front();
  }
  return OK;
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}
Stream* default_of(int device) {
  Stream*& stream = defaults[device];
  if (!stream) streams.insert(stream = new Stream{device, true, true});
  return stream;
}
Stream* stream_of(void* handle) {
  if ((uintptr_t)handle <= 2) return default_of(current);
  auto at = streams.find((Stream*)handle);
  if (at != streams.end()) return *at;
  fault(BAD_HANDLE, "stream", spelled("no stream has the handle %p", handle));
  return nullptr;
}
void run_to(Stream* stream, uint64_t position) {
  // A stream that waits for another process takes nothing else in between.
  if (stream->running) return;
  stream->running = true;
  while (stream->done < position && !stream->tasks.empty()) {
    Task task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
    bool ready = true;
    for (Mark& mark : task.waits) {
      run_to(mark.stream, mark.position);
      ready = ready && mark.stream->done >= mark.position;
    }
    if (!ready) {
      // Behind a stream that waits for another process itself: later.
      stream->tasks.push_front(std::move(task));
      break;
    }
    if (sticky == OK) { task.run(); tasks_done++; }
    stream->done++;
  }
  stream->running = false;
}
// Get to the events that other processes wait for: a device gets on by itself, here it does when that is needed.
void serve() {
  for (Event* event : events)
    if (event->shared && event->is_own && event->shared->wanted > event->shared->done) {
      auto at = event->marks.find(event->shared->wanted);
      if (at != event->marks.end()) run_to(at->second.stream, at->second.position);
    }
}
void start_serving() {
  static bool started = false;
  if (started) return;
  started = true;
  std::thread([] {
    for (;;) {
      usleep(500);
      std::lock_guard<std::recursive_mutex> locked(guard);
      serve();
    }
  }).detach();
}
void wait_for_process(SharedMark* shared, uint64_t number) {
  if (shared->wanted < number) shared->wanted = number;
  for (int i = 0; shared->done < number; i++) {
    if (i > 150000) { fault(ILLEGAL_ADDRESS, "event", "another process does not get to an event"); return; }
    serve();
    usleep(200);
  }
}
void count_wait() {
  waits_done++;
  waits_of_main += syscall(SYS_gettid) == getpid();
}
int wait_for(Stream* stream) {
  if (int code = stream->capture || stream->is_default ? breaks_capture("a wait for a stream") : OK) return code;
  count_wait();
  run_to(stream, stream->queued);
  return recent = sticky;
}
int wait_for_device(int device) {
  if (int code = breaks_capture("a wait for the device")) return code;
  count_wait();
  for (Stream* stream : streams) if (stream->device == device) run_to(stream, stream->queued);
  return recent = sticky;
}
int queue(Stream* stream, Task task) {
  if (stream->capture) {
    Node node{task.what, task.run, {}};
    for (void* pointer : task.touched)
      if (Block* block = pointer ? block_of(pointer) : nullptr) node.touched.push_back({pointer, block->number});
    stream->capture->nodes.push_back(std::move(node));
    return recent = sticky;
  }
  orders_of_main += syscall(SYS_gettid) == getpid();
  // The default stream waits for all that do not say otherwise, and they for it.
  for (Stream* other : streams)
    if (other != stream && other->device == stream->device && other->blocking && stream->blocking &&
        (other->is_default || stream->is_default) && other->done < other->queued)
      task.waits.push_back({other, other->queued});
  stream->tasks.push_back(std::move(task));
  stream->queued++;
  return recent = sticky;
}

sigjmp_buf escape;
void* bad_address;
void on_bad_access(int, siginfo_t* info, void*) {
  bad_address = info->si_addr;
  siglongjmp(escape, 1);
}
// Runs code of a kernel; false if it touched an address without access.
bool survives(const std::function<void()>& code) {
  struct sigaction action = {}, before[2];
  action.sa_sigaction = on_bad_access;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &before[0]);
  sigaction(SIGBUS, &action, &before[1]);
  bool survived = sigsetjmp(escape, 1) == 0;
  if (survived) code();
  sigaction(SIGSEGV, &before[0], nullptr);
  sigaction(SIGBUS, &before[1], nullptr);
  return survived;
}
bool check_pointer(const char* kernel, int parameter, void* pointer, int device) {
  if (!pointer) return true;
  std::string what = spelled("%s, argument %d", kernel, parameter);
  if ((uintptr_t)pointer % 16) {
    fault(ILLEGAL_ADDRESS, "alignment", spelled("%s: %p is on no 16-byte boundary", what.c_str(), pointer));
    return false;
  }
  return inside(what.c_str(), pointer, 0, device);
}
int copy(void* to, const void* from, size_t size, int to_device, int from_device, void* handle) {
  if (!size) return recent = sticky;
  Stream* stream = stream_of(handle);
  if (!stream) return recent;
  Block *target = block_of(to), *source = block_of(from);
  if ((to_device >= 0 || target) && !inside("copy to", to, size, to_device)) return recent;
  if ((from_device >= 0 || source) && !inside("copy from", from, size, from_device)) return recent;
  std::string what = spelled("copy of %zu bytes", size);
  if (from_device < 0 && !source) {
    // The runtime takes pageable memory over before it returns.
    if (stream->capture) return breaks_capture("a copy from memory of the host that is not pinned");
    std::string taken((const char*)from, size);
    return queue(stream, {what, {}, [=] {
      if (to_device < 0 || inside("copy to", to, size, to_device)) memcpy(to, taken.data(), size);
    }});
  }
  queue(stream, {what, {}, [=] {
    bool there = (to_device < 0 && !target) || inside("copy to", to, size, to_device);
    if (there && inside("copy from", from, size, from_device)) memcpy(to, from, size);
  }, {to, (void*)from}});
  return to_device < 0 && !target ? wait_for(stream) : recent;
}
int side_of(const void* address) { Block* block = block_of(address); return block ? block->device : -1; }
}  // namespace

#define LOCKED std::lock_guard<std::recursive_mutex> locked(guard)

extern "C" {
int straw_fault(int code, const char* kind, const char* text) {
  LOCKED;
  last = std::string(kind) + ": " + text;
  report.push_back(last);
  log_line(last);
  if (code == ILLEGAL_ADDRESS) sticky = code;
  return recent = code;
}
const char* straw_last() { return last.c_str(); }
int straw_forget(int home) { LOCKED; return wait_for_device(home); }
// One line for each fault, and one for each block that is still allocated.
size_t straw_report(char* text, size_t size, int blocks) {
  LOCKED;
  for (auto& [_, block] : live) look_around(block, "at the end");
  std::string all;
  for (auto& line : report) all += line + "\n";
  if (blocks)
    for (auto& [_, block] : live)
      all += spelled("leak: block %lu of %zu bytes on device %d\n", block.number, block.size, block.device);
  snprintf(text, size, "%s", all.c_str());
  return all.size();
}
// What a process logs when it ends: of its device the waits of its first thread, those of all others, tasks, and the
// blocks that are left on it when everything is done.
void straw_end() {
  LOCKED;
  for (Stream* stream : streams) run_to(stream, stream->queued);
  for (auto& [_, block] : live) look_around(block, "at the end");
  if (!tasks_done) return;
  Stream* busiest = *streams.begin();
  for (Stream* stream : streams) if (stream->done > busiest->done) busiest = stream;
  size_t left = 0;
  for (auto& [_, block] : live) left += block.device == busiest->device;
  log_line(spelled("end %d %lu %lu %lu %zu", busiest->device, waits_of_main, waits_done - waits_of_main, tasks_done, left));
  log_line(spelled("work %d %lu %lu %lu", busiest->device, orders_of_main, graphs_done, nodes_done));
}
void straw_clear() {
  LOCKED;
  report.clear();
  sticky = recent = OK;
  for (Stream* stream : streams) { stream->done = stream->queued; stream->tasks.clear(); }
}
// What was done: tasks and waits. Tests read differences.
void straw_counts(uint64_t* tasks, uint64_t* waits) { LOCKED; *tasks = tasks_done; *waits = waits_done; }
void straw_orders(uint64_t* orders) { LOCKED; *orders = orders_of_main; }
int straw_allocate(void** out, size_t size, int device) { LOCKED; return allocate(out, size, device); }
int straw_is_pinned(const void* address) { LOCKED; Block* block = block_of(address); return block && block->device < 0; }
// Work of a program on a stream, which touches some pointers; and memory that is freed behind such work.
int straw_queue(void* handle, const char* what, void (*run)(void*), void* data, int count, void** pointers) {
  LOCKED;
  // Torch looks for an error behind each launch, and takes one that somebody left.
  if (recent != OK) return cudaGetLastError();
  Stream* stream = stream_of(handle);
  if (!stream) return recent;
  std::vector<void*> touched(pointers, pointers + count);
  std::string name = what;
  int device = stream->device;
  return queue(stream, {name, {}, [=] {
    for (void* pointer : touched) if (pointer && !inside(name.c_str(), pointer, 0, device)) return;
    run(data);
  }, touched});
}
int straw_free_later(void* address, void* handle, int device) {
  LOCKED;
  int before = current;
  current = device;
  Stream* stream = stream_of(handle);
  current = before;
  if (!stream) return recent;
  return queue(stream, {"free", {}, [=] { release(address, false, "free"); }});
}
int straw_launch(const KernelRow* row, LaunchBlocks launch, int home, const CUlaunchConfig* c, void** values) {
  LOCKED;
  if (sticky) return sticky;
  Stream* stream = stream_of(c->stream);
  if (!stream) return BAD_HANDLE;
  std::string name = row->name;
  int threads = c->block[0], blocks = c->grid[0];
  if (!c->grid[0] || c->grid[1] != 1 || c->grid[2] != 1 || c->grid[0] > 0x7fffffff)
    return fault(INVALID_VALUE, "grid", spelled("%s: %u x %u x %u blocks", row->name, c->grid[0], c->grid[1], c->grid[2]));
  if (!threads || c->block[1] != 1 || c->block[2] != 1 || threads > (row->threads ? row->threads : 1024))
    return fault(INVALID_VALUE, "block", spelled("%s: %u x %u x %u threads, compiled for %d", row->name, c->block[0],
                                                 c->block[1], c->block[2], row->threads));
  if (row->shared + c->shared > 48 * 1024)
    return fault(INVALID_VALUE, "shared", spelled("%s: %u bytes of shared memory", row->name, row->shared + c->shared));
  if (stream->device != home || current != home)
    return fault(ILLEGAL_ADDRESS, "device", spelled("%s: its module is on device %d, its stream on %d, the current one is %d",
                                         row->name, home, stream->device, current));
  std::vector<std::string> taken;
  std::vector<void*> pointers;
  for (int i = 0; row->parameters[i]; i++) {
    int size = row->parameters[i];
    taken.emplace_back((const char*)values[i], size < 0 ? -size : size);
    void* pointer = nullptr;
    if (size < 0) memcpy(&pointer, values[i], sizeof pointer);
    pointers.push_back(pointer);
    if (size < 0 && !check_pointer(row->name, i, pointer, home)) return recent;
  }
  return queue(stream, {name, {}, [=]() mutable {
    std::vector<void*> given;
    for (size_t i = 0; i < taken.size(); i++) {
      given.push_back(taken[i].data());
      if (!check_pointer(name.c_str(), i, pointers[i], home)) return;
    }
    if (!survives([&] { launch(row->run, given.data(), blocks, threads, row->together); })) {
      fault(ILLEGAL_ADDRESS, "access", spelled("%s touched %p, %s", name.c_str(), bad_address, place_of(bad_address).c_str()));
      return;
    }
    for (void* pointer : pointers) if (pointer) look_around(*block_of(pointer), name.c_str());
  }, pointers});
}

int cudaGetDeviceCount(int* count) { *count = device_count(); return OK; }
int cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return recent = 101;
  current = device;
  return OK;
}
int cudaGetDevice(int* device) { *device = current; return OK; }
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  static const std::map<int, int> known = {{1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 0x7fffffff}, {6, 65535},
    {7, 65535}, {8, 48 * 1024}, {9, 65536}, {10, 32}, {12, 65536}, {13, 1000000}, {16, 132}, {38, 50 << 20},
    {97, 227 * 1024}};
  if (attribute == 75 || attribute == 76) { *value = attribute == 75 ? capability() / 10 : capability() % 10; return OK; }
  auto at = known.find(attribute);
  *value = at == known.end() ? 0 : at->second;
  return at == known.end() ? recent = INVALID_VALUE : OK;
}
int cudaGetDeviceProperties(void*, int) { return recent = UNSUPPORTED; }
const char* cudaGetErrorName(int code) { return code == OK ? "cudaSuccess" : code == NO_MEMORY ? "cudaErrorMemoryAllocation" : "cudaErrorOfStraw"; }
const char* cudaGetErrorString(int code) { return code == OK ? "no error" : code == NO_MEMORY ? "out of memory" : last.c_str(); }
int cudaGetLastError() { int code = recent; recent = sticky; return code; }
int cudaPeekAtLastError() { return recent; }
int cudaMemGetInfo(size_t* free, size_t* total) { LOCKED; *total = CAPACITY; *free = CAPACITY - std::min(CAPACITY, used[current] + used_elsewhere(current)); return OK; }

int cudaMalloc(void** out, size_t size) { LOCKED; if (int code = breaks_capture("cudaMalloc")) return code; return sticky ? sticky : allocate(out, size, current); }
int cudaFree(void* address) { LOCKED; if (int code = breaks_capture("cudaFree")) return code; wait_for_device(side_of(address)); return release(address, false, "cudaFree"); }
int cudaMallocHost(void** out, size_t size) { LOCKED; if (int code = breaks_capture("cudaMallocHost")) return code; return allocate(out, size, -1); }
int cudaFreeHost(void* address) { LOCKED; if (int code = breaks_capture("cudaFreeHost")) return code; return release(address, true, "cudaFreeHost"); }
int cudaHostRegister(void* address, size_t size, unsigned) {
  LOCKED;
  if (int code = breaks_capture("cudaHostRegister")) return code;
  if ((uintptr_t)address % PAGE || block_of(address))
    return fault(INVALID_VALUE, "register", spelled("%p is on no page, or %s", address, place_of(address).c_str()));
  // A fault that tests ask for: memory is not pinned after all.
  if (is_fault("unpinned")) return OK;
  live[(char*)address] = {(char*)address, (char*)address, 0, size, -1, allocations++};
  return OK;
}
int cudaHostUnregister(void* address) {
  LOCKED;
  auto at = live.find((char*)address);
  if (at == live.end() || at->second.mapped) return fault(INVALID_VALUE, "register", spelled("%p was not registered", address));
  live.erase(at);
  return OK;
}
// Memory and events of two processes. A handle names a file of the process that made it.
static int open_of(const Handle& handle) {
  std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
  return open(path.c_str(), O_RDWR);
}
int cudaIpcGetMemHandle(Handle* handle, void* address) {
  LOCKED;
  Block* block = block_of(address);
  if (!block || block->base != address || block->device < 0)
    return fault(INVALID_VALUE, "handle", spelled("%p is %s", address, place_of(address).c_str()));
  char* inner = block->map + PAGE;
  size_t size = block->mapped - 2 * PAGE;
  int file = memfd_create("straw", 0);
  if (ftruncate(file, size) || pwrite(file, inner, size, 0) != ssize_t(size)) return recent = NO_MEMORY;
  mmap(inner, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
  *handle = {getpid(), file, block->device, size_t(block->base - inner), block->size, block->mapped};
  return OK;
}
int cudaIpcOpenMemHandle(void** out, CHandle given, unsigned) {
  LOCKED;
  Handle handle;
  memcpy(&handle, &given, sizeof handle);
  int file = open_of(handle);
  if (file < 0) return fault(INVALID_VALUE, "handle", "no process has this memory");
  char* map = (char*)mmap(nullptr, handle.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mmap(map + PAGE, handle.mapped - 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
  close(file);
  char* base = map + PAGE + handle.offset;
  live[base] = {map, base, handle.mapped, handle.size, handle.device, allocations++};
  *out = base;
  return OK;
}
int cudaIpcGetEventHandle(Handle* handle, void* event) {
  LOCKED;
  Event* e = (Event*)event;
  if (!events.count(e) || e->file < 0) return fault(BAD_HANDLE, "event", "no event of two processes");
  *handle = {getpid(), e->file, 0, 0, 0, 0};
  return OK;
}
int cudaIpcOpenEventHandle(void** out, CHandle given) {
  LOCKED;
  Handle handle;
  memcpy(&handle, &given, sizeof handle);
  int file = open_of(handle);
  if (file < 0) return fault(BAD_HANDLE, "event", "no process has this event");
  Event* e = new Event;
  e->shared = (SharedMark*)mmap(nullptr, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  e->is_own = false;
  close(file);
  events.insert(e);
  *out = e;
  return OK;
}
int cudaEventCreateWithFlags(void** out, unsigned flags) {
  LOCKED;
  Event* e = new Event;
  if (flags & 4) {
    e->file = memfd_create("straw", 0);
    if (ftruncate(e->file, PAGE)) return recent = NO_MEMORY;
    e->shared = (SharedMark*)mmap(nullptr, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, e->file, 0);
    start_serving();
  }
  events.insert(e);
  *out = e;
  return OK;
}
int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  LOCKED;
  if (sticky) return sticky;
  int sides[2] = {side_of(to), side_of(from)};
  if (kind != 4) {
    // The caller says which side is which; what it says is held against where the addresses are.
    if (kind == 0 || kind == 2) sides[0] = -1; else if (sides[0] < 0) sides[0] = current;
    if (kind == 0 || kind == 1) sides[1] = -1; else if (sides[1] < 0) sides[1] = current;
  }
  return copy(to, from, size, sides[0], sides[1], stream);
}
int cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t size, void* stream) {
  LOCKED;
  return sticky ? sticky : copy(to, from, size, to_device, from_device, stream);
}
int cudaStreamCreateWithFlags(void** out, unsigned flags) {
  LOCKED;
  Stream* stream = new Stream{current, !(flags & 1), false};
  streams.insert(stream);
  *out = stream;
  return OK;
}
int cudaStreamCreate(void** out) { return cudaStreamCreateWithFlags(out, 0); }
// Work that was queued is still to be done, so the stream stays.
int cudaStreamDestroy(void* handle) { LOCKED; return stream_of(handle) ? OK : BAD_HANDLE; }
int cudaStreamSynchronize(void* handle) { LOCKED; Stream* s = stream_of(handle); return s ? wait_for(s) : BAD_HANDLE; }
int cudaDeviceSynchronize() { LOCKED; return wait_for_device(current); }
int cudaStreamWaitEvent(void* handle, void* event, unsigned) {
  LOCKED;
  Stream* stream = stream_of(handle);
  if (!stream || !events.count((Event*)event)) return fault(BAD_HANDLE, "event", "no such stream or event");
  // Streams that are forked within a capture are not made here.
  if (stream->capture) return breaks_capture("a wait for an event of before");
  SharedMark* shared = ((Event*)event)->shared;
  if (shared && !((Event*)event)->is_own) {
    // A fault that tests ask for: no device waits for that of another process.
    if (is_fault("process")) return OK;
    uint64_t number = shared->recorded;
    return queue(stream, {"wait for another process", {}, [=] { wait_for_process(shared, number); }});
  }
  Mark mark = ((Event*)event)->mark;
  return mark.stream ? queue(stream, {"wait for an event", {mark}, [] {}}) : OK;
}
int cudaEventCreate(void** out) { LOCKED; Event* event = new Event; events.insert(event); *out = event; return OK; }
int cudaEventDestroy(void* event) { LOCKED; if (!events.erase((Event*)event)) return BAD_HANDLE; delete (Event*)event; return OK; }
int cudaEventRecord(void* event, void* handle) {
  LOCKED;
  Stream* stream = stream_of(handle);
  if (!stream || !events.count((Event*)event)) return fault(BAD_HANDLE, "event", "no such stream or event");
  if (stream->capture) return breaks_capture("an event");
  Event* e = (Event*)event;
  std::shared_ptr<double> at = e->at = std::make_shared<double>(-1);
  SharedMark* shared = e->shared;
  if (shared && !e->is_own) return fault(BAD_HANDLE, "event", "an event of another process");
  uint64_t number = shared ? shared->recorded + 1 : 0;
  queue(stream, {"event", {}, [=] { *at = now(); if (shared) shared->done = number; }});
  e->mark = {stream, stream->queued};
  if (shared) {
    e->marks[number] = e->mark;
    while (e->marks.size() > 64) e->marks.erase(e->marks.begin());
    shared->recorded = number;
  }
  return OK;
}
int cudaEventSynchronize(void* event) {
  LOCKED;
  if (!events.count((Event*)event)) return fault(BAD_HANDLE, "event", "no such event");
  if (int code = breaks_capture("a wait for an event")) return code;
  Mark mark = ((Event*)event)->mark;
  count_wait();
  if (mark.stream) run_to(mark.stream, mark.position);
  return recent = sticky;
}
int cudaEventQuery(void* event) {
  LOCKED;
  if (!events.count((Event*)event)) return fault(BAD_HANDLE, "event", "no such event");
  if (int code = breaks_capture("a look at an event")) return code;
  Mark mark = ((Event*)event)->mark;
  if (sticky) return recent = sticky;
  return !mark.stream || mark.stream->done >= mark.position ? OK : NOT_READY;
}
int cudaEventElapsedTime(float* ms, void* first, void* second) {
  LOCKED;
  if (!events.count((Event*)first) || !events.count((Event*)second)) return fault(BAD_HANDLE, "event", "no such event");
  std::shared_ptr<double> from = ((Event*)first)->at, to = ((Event*)second)->at;
  if (!from || !to) return fault(BAD_HANDLE, "event", "an event without a time");
  if (*from < 0 || *to < 0) return recent = NOT_READY;
  *ms = *to - *from;
  return OK;
}
int cudaStreamBeginCapture(void* handle, int) {
  LOCKED;
  Stream* stream = stream_of(handle);
  if (!stream) return BAD_HANDLE;
  if (stream->is_default || stream->capture || sticky) return refuse("the default stream, or one that is captured");
  if (int code = breaks_capture("a second capture")) return code;
  stream->capture.reset(new Capture{syscall(SYS_gettid), "", {}});
  return OK;
}
int cudaStreamEndCapture(void* handle, void** out) {
  LOCKED;
  *out = nullptr;
  Stream* stream = stream_of(handle);
  if (!stream || !stream->capture) return refuse("no capture ends here");
  std::unique_ptr<Capture> capture = std::move(stream->capture);
  if (!capture->broken.empty()) { last = "capture: " + capture->broken; return recent = BROKEN_CAPTURE; }
  *out = new Nodes(new std::vector<Node>(std::move(capture->nodes)));
  return recent = OK;
}
int cudaGraphInstantiate(void** out, void* graph, unsigned long long) { LOCKED; *out = new Nodes(*(Nodes*)graph); return OK; }
int cudaGraphDestroy(void* graph) { LOCKED; delete (Nodes*)graph; return OK; }
int cudaGraphExecDestroy(void* graph) { LOCKED; delete (Nodes*)graph; return OK; }
int cudaGraphLaunch(void* graph, void* handle) {
  LOCKED;
  Stream* stream = stream_of(handle);
  if (!stream) return BAD_HANDLE;
  if (stream->capture) return breaks_capture("a graph");
  Nodes nodes = *(Nodes*)graph;
  return queue(stream, {spelled("graph of %zu nodes", nodes->size()), {}, [=] {
    graphs_done++;
    for (Node& node : *nodes) {
      for (auto& [pointer, number] : node.touched) {
        Block* block = block_of(pointer);
        if (block && block->number == number) continue;
        fault(ILLEGAL_ADDRESS, "graph", spelled("%s: %p was in block %lu when it was captured, and is in %s",
                                                node.what.c_str(), pointer, number, place_of(pointer).c_str()));
      }
      if (sticky) return;
      node.run();
      nodes_done++;
    }
  }});
}
}

#else  // STRAW_DRIVER

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

namespace {
struct Module { void* library; int device; };
struct Function { const KernelRow* row; LaunchBlocks launch; int device; };
}  // namespace

extern "C" {
int cuModuleLoadData(void** out, const void* image) {
  // A shared library ends with the table of its sections.
  const Elf64_Ehdr* head = (const Elf64_Ehdr*)image;
  if (memcmp(head->e_ident, ELFMAG, SELFMAG)) return straw_fault(200, "module", "the image is no shared library");
  size_t size = head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
  int file = memfd_create("kernels", 0);
  for (size_t at = 0; at < size;) {
    ssize_t wrote = write(file, (const char*)image + at, size - at);
    if (wrote <= 0) return straw_fault(200, "module", "the image cannot be written");
    at += wrote;
  }
  std::string path = "/proc/self/fd/" + std::to_string(file);
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  close(file);
  if (!library) return straw_fault(200, "module", dlerror());
  Module* module = new Module{library, 0};
  cudaGetDevice(&module->device);
  *out = module;
  return OK;
}
int cuModuleUnload(void* handle) {
  // The driver waits for what uses a module.
  Module* module = (Module*)handle;
  straw_forget(module->device);
  dlclose(module->library);
  delete module;
  return OK;
}
int cuModuleGetFunction(void** out, void* handle, const char* name) {
  Module* module = (Module*)handle;
  const KernelRow* row = (const KernelRow*)dlsym(module->library, "kernels");
  LaunchBlocks launch = (LaunchBlocks)dlsym(module->library, "launch");
  for (; row && row->name; row++)
    if (!strcmp(row->name, name)) {
      *out = new Function{row, launch, module->device};
      return OK;
    }
  return straw_fault(500, "function", name);
}
int cuFuncSetAttribute(void*, int, int) { return OK; }
int cuLaunchKernelEx(const CUlaunchConfig* config, void* handle, void** values, void**) {
  Function* function = (Function*)handle;
  return straw_launch(function->row, function->launch, function->device, config, values);
}
int cuGetErrorName(int code, const char** text) { *text = code ? "CUDA_ERROR_OF_STRAW" : "CUDA_SUCCESS"; return OK; }
int cuGetErrorString(int code, const char** text) { *text = code ? straw_last() : "no error"; return OK; }
int cuDeviceGetName(char* name, int size, int) { snprintf(name, size, "Straw"); return OK; }
int cuTensorMapEncodeTiled() { return UNSUPPORTED; }
}
#endif
