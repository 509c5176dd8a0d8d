/* The static part of nvplug: unpacks the program into files without names, and starts it in this very process.
 *
 * The rest is a Python with its libraries and the glibc that they were built for, so that the host's does not matter.
 * Each is unpacked into a memfd, which the dynamic loader later opens as /proc/self/fd/N. Nothing has a name in a file
 * system, so nothing is left behind, however the process ends, and no writable or executable directory is needed. Where
 * memfds may not be executed, unlinked files in $TMPDIR or the like serve.
 *
 * Then the loader and the program are mapped and entered as the kernel would have done it. Rejected: execve, after which
 * /proc/PID/exe, comm and the command line would be those of an anonymous file, which monitors of hosts take for malware;
 * a parent with a child, as PyInstaller and staticx have, which doubles what signals can go wrong; and a static
 * glibc here, which would register its own rseq area with the kernel before the program's glibc can.
 *
 * One command is answered here, before anything is unpacked: `nvplug health`.
 *
 * The payload, made by bundle.py: a count, that many records, then the contents, each one block of LZ4 or stored. File i
 * gets the descriptor FIRST_FD + i. File 0 is the dynamic loader, file 1 the program.
 */

#include <asm/unistd.h>
#include <elf.h>
#include <linux/errno.h>
#include <linux/fcntl.h>
#include <linux/mman.h>
#include <linux/socket.h>
#include <linux/time_types.h>
#include <linux/un.h>
#include <stddef.h>
#include <stdint.h>

/* Of linux/memfd.h: the first since Linux 6.3. What we map we never execve, so its file needs no execute bit. */
#define MFD_NOEXEC_SEAL 0x8U
#define MFD_CLOEXEC 0x1U

enum { LOADER, PROGRAM };

struct record {
    char name[40];
    uint32_t size;
    uint32_t packed; /* equal to size: stored */
};

extern const struct {
    uint64_t count;
    struct record records[];
} payload;
extern const uint8_t payload_end[];

__asm__(".section .payload, \"a\"\n"
        ".balign 65536\n"
        ".global payload, payload_end\n"
        "payload: .incbin \"" PAYLOAD "\"\n"
        ".skip 16\n" /* copy() reads that far */
        ".balign 65536\n"
        "payload_end:\n"
        ".previous\n");

/* --- the kernel */

#if defined(__x86_64__)
__asm__(".global _start\n"
        "_start: xor %ebp, %ebp\n"
        "mov %rsp, %rdi\n"
        "call launch\n"
        "xor %edx, %edx\n" /* no function for atexit */
        "jmp *%rax\n");

static long call(long number, long a, long b, long c, long d, long e, long f)
{
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "0"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
#elif defined(__aarch64__)
__asm__(".global _start\n"
        "_start: mov x29, #0\n"
        "mov x0, sp\n"
        "bl launch\n"
        "mov x16, x0\n"
        "mov x0, #0\n"
        "mov x30, #0\n"
        "br x16\n");

static long call(long number, long a, long b, long c, long d, long e, long f)
{
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}
#else
#error "only amd64 and arm64"
#endif

#define CALL(number, a, b, c, d, e, f) \
    call((number), (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))

static int is_error(long result) { return result < 0 && result > -4096; }

static long map(void *at, size_t size, int protection, int flags, int fd, size_t offset)
{
    return CALL(__NR_mmap, at, size, protection, flags, fd, offset);
}

/* --- the C library, as far as it is needed. The compiler, too, calls the first two. */

void *memcpy(void *to, const void *from, size_t size)
{
    uint8_t *target = to;
    const uint8_t *source = from;
    while (size--) {
        *target++ = *source++;
    }
    return to;
}

void *memset(void *to, int byte, size_t size)
{
    uint8_t *target = to;
    while (size--) {
        *target++ = (uint8_t)byte;
    }
    return to;
}

static size_t length(const char *text)
{
    size_t size = 0;
    while (text[size]) {
        size++;
    }
    return size;
}

static void say(const char *text) { CALL(__NR_write, 2, text, length(text), 0, 0, 0); }

static void say_number(unsigned long number)
{
    char digits[24];
    char *first = digits + sizeof digits - 1;
    *first = '\0';
    do {
        *--first = (char)('0' + number % 10);
        number /= 10;
    } while (number);
    say(first);
}

static void say_error(long error)
{
    switch (-error) {
    case EPERM: say("not permitted"); break;
    case ENOENT: say("no such directory"); break;
    case ENOMEM: say("no memory"); break;
    case EACCES: say("permission denied"); break;
    case ENOTDIR: say("not a directory"); break;
    case EMFILE: case ENFILE: say("too many open files"); break;
    case ENOSPC: say("no space left"); break;
    case EROFS: say("read-only"); break;
    case ENOSYS: say("no such system call"); break;
    case EOPNOTSUPP: say("no files without names there"); break;
    default: say("error "); say_number((unsigned long)-error);
    }
}

static void end(int status) __attribute__((noreturn));
static void end(int status)
{
    CALL(__NR_exit_group, status, 0, 0, 0, 0, 0);
    __builtin_unreachable();
}

static void give_up(const char *why) __attribute__((noreturn));
static void give_up(const char *why)
{
    say(why);
    say("\n");
    /* As a shell has it for a program that is there and cannot be executed. */
    end(126);
}

/* --- unpacking */

/* Copies forwards, by sixteens where it may: up to 15 bytes more than asked for, which are written over next. */
static uint8_t *copy(uint8_t *to, const uint8_t *from, size_t size, const uint8_t *limit)
{
    uint8_t *end = to + size;
    if (to - from >= 16 || from > to) {
        while (to < end && limit - to >= 16) {
            __builtin_memcpy(to, from, 16);
            to += 16;
            from += 16;
        }
        /* Too far by this much. */
        if (to > end) {
            return end;
        }
    }
    while (to < end) {
        *to++ = *from++;
    }
    return end;
}

static size_t unpack_length(const uint8_t **from, size_t nibble)
{
    if (nibble == 15) {
        do {
            nibble += **from;
        } while (*(*from)++ == 255);
    }
    return nibble;
}

/* One block of LZ4. What it reads was made by bundle.py and is part of this executable: it is trusted. */
static void unpack(uint8_t *to, size_t size, const uint8_t *from, size_t packed)
{
    const uint8_t *limit = to + size;
    const uint8_t *end = from + packed;
    for (;;) {
        unsigned token = *from++;
        size_t literals = unpack_length(&from, token >> 4);
        to = copy(to, from, literals, limit);
        from += literals;
        if (from == end) {
            return;
        }
        const uint8_t *match = to - (from[0] | from[1] << 8);
        from += 2;
        to = copy(to, match, unpack_length(&from, token & 15) + 4, limit);
    }
}

/* A file without a name, or an error. Where: NULL is memory. */
static long open_file(const char *where, const char *name)
{
    if (!where) {
        long fd = CALL(__NR_memfd_create, name, MFD_CLOEXEC | MFD_NOEXEC_SEAL, 0, 0, 0, 0);
        return fd == -EINVAL ? CALL(__NR_memfd_create, name, MFD_CLOEXEC, 0, 0, 0, 0) : fd;
    }
    return CALL(__NR_openat, AT_FDCWD, where, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600, 0, 0);
}

/* Unpacks one file and gives it its descriptor; 0 or an error. */
static long unpack_file(const char *where, const struct record *record, const uint8_t *content, int target)
{
    long fd = open_file(where, record->name);
    if (is_error(fd)) {
        return fd;
    }
    /* All the space at once, so that a full disk is an error here and not a SIGBUS later. */
    long result = CALL(__NR_fallocate, fd, 0, 0, record->size, 0, 0);
    if (result == -EOPNOTSUPP) {
        result = CALL(__NR_ftruncate, fd, record->size, 0, 0, 0, 0);
    }
    if (!is_error(result)) {
        result = map(NULL, record->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, (int)fd, 0);
    }
    if (!is_error(result)) {
        uint8_t *to = (uint8_t *)result;
        if (record->packed == record->size) {
            copy(to, content, record->size, to + record->size);
        } else {
            unpack(to, record->size, content, record->packed);
        }
        CALL(__NR_munmap, to, record->size, 0, 0, 0, 0);
        result = CALL(__NR_dup3, fd, target, 0, 0, 0, 0);
        if (result == -EBADF) {
            give_up("nvplug: the limit of open files is too low; raise it to 1024 (ulimit -n, LimitNOFILE=)");
        }
    }
    CALL(__NR_close, fd, 0, 0, 0, 0, 0);
    return is_error(result) ? result : 0;
}

/* Unpacks everything; 0 or an error. */
static long unpack_all(const char *where)
{
    const uint8_t *content = (const uint8_t *)&payload.records[payload.count];
    for (size_t index = 0; index < payload.count; index++) {
        const struct record *record = &payload.records[index];
        long result = unpack_file(where, record, content, FIRST_FD + (int)index);
        if (!is_error(result) && index == 0) {
            /* A directory that is mounted noexec says so here. */
            result = map(NULL, 1, PROT_READ | PROT_EXEC, MAP_PRIVATE, FIRST_FD, 0);
            if (!is_error(result)) {
                CALL(__NR_munmap, result, 1, 0, 0, 0, 0);
            }
        }
        if (is_error(result)) {
            return result;
        }
        content += record->packed;
    }
    return 0;
}

static const char *variable(char **environment, const char *name)
{
    size_t size = length(name);
    for (; *environment; environment++) {
        size_t position = 0;
        while (position < size && (*environment)[position] == name[position]) {
            position++;
        }
        if (position == size && (*environment)[size] == '=') {
            return *environment + size + 1;
        }
    }
    return NULL;
}

static void unpack_somewhere(char **environment)
{
    const char *places[] = {NULL, variable(environment, "RUNTIME_DIRECTORY"), variable(environment, "TMPDIR"),
                            "/tmp", "/run", "/dev/shm"};
    enum { PLACES = sizeof places / sizeof *places };
    long results[PLACES];
    for (size_t index = 0; index < PLACES; index++) {
        results[index] = 0;
        if (index == 0 || (places[index] && *places[index])) {
            results[index] = unpack_all(places[index]);
            if (!results[index]) {
                return;
            }
        }
    }
    say("nvplug: cannot unpack itself anywhere: ");
    for (size_t index = 0; index < PLACES; index++) {
        if (results[index]) {
            say(index ? ", " : "");
            say(index ? places[index] : "in memory");
            say(": ");
            say_error(results[index]);
        }
    }
    give_up("; let it use memfd_create, or point TMPDIR at a directory that is writable and not mounted noexec");
}

/* --- starting */

struct image {
    uint8_t *base;
    Elf64_Ehdr header;
};

/* Maps a position-independent ELF file as the kernel would. */
static struct image load(int fd, size_t page)
{
    struct image image;
    Elf64_Phdr segments[16];
    CALL(__NR_pread64, fd, &image.header, sizeof image.header, 0, 0, 0);
    size_t count = image.header.e_phnum;
    if (count > 16) {
        give_up("nvplug: built wrongly: too many segments");
    }
    CALL(__NR_pread64, fd, segments, count * sizeof *segments, image.header.e_phoff, 0, 0);
    size_t span = 0;
    for (size_t index = 0; index < count; index++) {
        if (segments[index].p_type == PT_LOAD) {
            span = segments[index].p_vaddr + segments[index].p_memsz;
        }
    }
    long base = map(NULL, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (is_error(base)) {
        give_up("nvplug: no memory to start in");
    }
    image.base = (uint8_t *)base;
    for (size_t index = 0; index < count; index++) {
        const Elf64_Phdr *segment = &segments[index];
        if (segment->p_type != PT_LOAD) {
            continue;
        }
        int protection = (segment->p_flags & PF_R ? PROT_READ : 0) | (segment->p_flags & PF_W ? PROT_WRITE : 0) |
                         (segment->p_flags & PF_X ? PROT_EXEC : 0);
        size_t slack = segment->p_vaddr & (page - 1);
        uint8_t *start = image.base + segment->p_vaddr - slack;
        uint8_t *file_end = image.base + segment->p_vaddr + segment->p_filesz;
        uint8_t *end = image.base + segment->p_vaddr + segment->p_memsz;
        uint8_t *file_page_end = (uint8_t *)(((uintptr_t)file_end + page - 1) & ~(page - 1));
        long result = map(start, (size_t)(file_end - start), protection, MAP_PRIVATE | MAP_FIXED, fd,
                          segment->p_offset - slack);
        if (!is_error(result) && end > file_end) {
            /* The whole page, as the loader allocates its first memory between its end and that of the page. */
            memset(file_end, 0, (size_t)(file_page_end - file_end));
            if (end > file_page_end) {
                result = map(file_page_end, (size_t)(end - file_page_end), protection,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
            }
        }
        if (is_error(result)) {
            say("nvplug: cannot map itself: ");
            say_error(result);
            give_up("; a security module may forbid it, or memory may be short");
        }
    }
    return image;
}

/* --- nvplug health, as commands/health.py has it, word for word. Here because probes ask every few seconds. */

#define AF_UNIX 1
#define SOCK_SEQPACKET 5
#define SOL_SOCKET 1
#define SO_PEERCRED 17
#define SO_RCVTIMEO 20 /* with two words of 64 bits, as all are here */
#define SO_SNDTIMEO 21 /* connect waits for as long */
#define PATIENCE 5

static int is(const char *text, const char *other)
{
    size_t position = 0;
    while (text[position] && text[position] == other[position]) {
        position++;
    }
    return text[position] == other[position];
}

/* Ends the process with the answer, if this is what is asked for in words that are understood here; Python has the rest. */
static void answer_health(long count, char **words, char **environment)
{
    int ready = count == 3 && is(words[2], "--ready");
    if (!(count == 2 || ready) || !is(words[1], "health")) {
        return;
    }
    const char *name = variable(environment, "HEALTH_SOCKET");
    if (!name || !*name) {
        name = "@nvplug";
    }
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t size = length(name);
    if (name[0] != '@' || size < 2 || size >= sizeof address.sun_path) {
        return;
    }
    memcpy(address.sun_path + 1, name + 1, size - 1);

    long socket = CALL(__NR_socket, AF_UNIX, SOCK_SEQPACKET, 0, 0, 0, 0);
    const struct __kernel_old_timeval patience = {.tv_sec = PATIENCE};
    CALL(__NR_setsockopt, socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience, 0);
    CALL(__NR_setsockopt, socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience, 0);
    long result = CALL(__NR_connect, socket, &address, offsetof(struct sockaddr_un, sun_path) + size, 0, 0, 0);
    struct {
        int32_t process;
        uint32_t user, group;
    } peer = {0, 0, 0};
    uint32_t peer_size = sizeof peer;
    CALL(__NR_getsockopt, socket, SOL_SOCKET, SO_PEERCRED, &peer, &peer_size, 0);
    char answer[4096];
    if (!is_error(result)) {
        result = CALL(__NR_recvfrom, socket, answer, sizeof answer - 1, 0, 0, 0);
    }
    if (is_error(result)) {
        if (result == -EAGAIN) {
            say("nvplug: no answer from ");
            say(name);
            say(" within 5 s; nvplug hangs: restart it\n");
        } else {
            say("nvplug: nobody answers at ");
            say(name);
            say("; ask where nvplug runs, in its network namespace and with its HEALTH_SOCKET\n");
        }
        end(1);
    }
    if (result < 3 || (peer.user != 0 && peer.user != CALL(__NR_geteuid, 0, 0, 0, 0, 0, 0))) {
        say("nvplug: what answers at ");
        say(name);
        say(" is not nvplug; see who it is: ss -xlp\n");
        end(1);
    }
    answer[result] = '\n';
    CALL(__NR_write, 1, answer + 3, result - 2, 0, 0, 0);
    end(answer[ready] != '0');
}

static Elf64_auxv_t *find(Elf64_auxv_t *vector, uint64_t type)
{
    while (vector->a_type != type && vector->a_type != AT_NULL) {
        vector++;
    }
    return vector;
}

/* Called once by _start, with the stack that the kernel made; returns where to go on, on the same stack. */
__attribute__((used)) uint8_t *launch(long *stack)
{
    char **environment = (char **)(stack + 1 + stack[0] + 1);
    char **last = environment;
    while (*last) {
        last++;
    }
    Elf64_auxv_t *vector = (Elf64_auxv_t *)(last + 1);

    answer_health(stack[0], (char **)(stack + 1), environment);
    unpack_somewhere(environment);
    if (CALL(__NR_faccessat, AT_FDCWD, "/proc/self/fd/0", 0, 0, 0, 0) == -ENOENT &&
        CALL(__NR_faccessat, AT_FDCWD, "/proc/self/fd", 0, 0, 0, 0) == -ENOENT) {
        give_up("nvplug: /proc is not mounted; mount it (mount -t proc proc /proc), as nvplug starts out of /proc/self/fd");
    }
    size_t page = find(vector, AT_PAGESZ)->a_un.a_val;
    struct image loader = load(FIRST_FD + LOADER, page);
    struct image program = load(FIRST_FD + PROGRAM, page);
    find(vector, AT_PHDR)->a_un.a_val = (uint64_t)(program.base + program.header.e_phoff);
    find(vector, AT_PHNUM)->a_un.a_val = program.header.e_phnum;
    find(vector, AT_ENTRY)->a_un.a_val = (uint64_t)(program.base + program.header.e_entry);
    find(vector, AT_BASE)->a_un.a_val = (uint64_t)loader.base;
    CALL(__NR_munmap, &payload, (size_t)(payload_end - (const uint8_t *)&payload), 0, 0, 0, 0);
    return loader.base + loader.header.e_entry;
}
