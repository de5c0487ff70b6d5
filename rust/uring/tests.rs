#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

/// Hands out reads and collects what comes back.
struct List<'a> {
    left: Vec<Read<'a, usize>>,
    done: Vec<Read<'a, usize>>,
    running: usize,
    most_running: usize,
    panics: bool,
}

impl<'a> List<'a> {
    fn new(left: Vec<Read<'a, usize>>) -> Self {
        Self {
            left,
            done: Vec::new(),
            running: 0,
            most_running: 0,
            panics: false,
        }
    }
}

impl<'a> Work<Read<'a, usize>> for List<'a> {
    fn next(&mut self) -> Option<Read<'a, usize>> {
        let next = self.left.pop()?;
        self.running += 1;
        self.most_running = self.most_running.max(self.running);
        Some(next)
    }
    fn done(&mut self, operation: Read<'a, usize>) {
        assert!(!self.panics, "work panics");
        self.running -= 1;
        self.done.push(operation);
    }
}

/// A ring, or none where `io_uring` is blocked.
fn ring() -> Option<Ring> {
    Ring::new().inspect_err(|e| eprintln!("not run: {e}")).ok()
}

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn pattern(len: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn short_answers_are_continued() {
    // Promise: whatever an answer moves, a read gets all bytes, in place, within the depth; also after the
    // kernel would take no more.
    let bytes = pattern(300_000);
    let file = file(&bytes);
    let Some(mut ring) = ring() else { return };
    for (most, depth, broken) in [
        (MOST, 64, false),
        (997, 7, false),
        (50_000, 1, false),
        (997, 7, true),
    ] {
        ring.broken = broken;
        let mut memory = vec![0; 299_997];
        let reads = memory
            .chunks_mut(10_007)
            .enumerate()
            .map(|(at, out)| {
                let (offset, wanted) = (3 + 10_007 * at as u64, out.len());
                let mut read = Read::new(file.as_fd(), offset, Buffer::Borrowed(out), wanted, at);
                read.most = most;
                read
            })
            .collect();
        let mut list = List::new(reads);
        ring.run(depth, &mut list);
        assert_eq!(list.done.len(), 30);
        assert!(
            list.done
                .iter()
                .all(|read| read.error.is_none() && read.got == read.wanted)
        );
        assert!(list.most_running <= depth);
        assert!(memory == bytes[3..]);
    }
}

#[test]
fn ends_and_errors_are_told() {
    // Promise: the end of a file gives fewer bytes, what the kernel refuses its number; the others go on.
    let bytes = pattern(10_000);
    let (good, temp) = (file(&bytes), tempfile::NamedTempFile::new().unwrap());
    let unreadable = File::options().append(true).open(temp.path()).unwrap();
    let Some(mut ring) = ring() else { return };
    for broken in [false, true] {
        ring.broken = broken;
        let mut memory = [[0; 4000]; 3];
        let files = [&good, &good, &unreadable];
        let offsets = [1000, 8000, 0];
        let reads = memory.iter_mut().enumerate().map(|(at, out)| {
            Read::new(
                files[at].as_fd(),
                offsets[at],
                Buffer::Borrowed(out),
                4000,
                at,
            )
        });
        let mut list = List::new(reads.collect());
        ring.run(8, &mut list);
        list.done.sort_by_key(|read| read.tag);
        let told: Vec<_> = list
            .done
            .iter()
            .map(|read| (read.got, read.error))
            .collect();
        assert_eq!(told, [(4000, None), (2000, None), (0, Some(Errno::BADF))]);
        assert!(memory[0] == bytes[1000..5000] && memory[1][..2000] == bytes[8000..]);
    }
}

#[test]
fn a_panic_waits_for_the_kernel() {
    // Promise: when the work panics, `run` unwinds only after every answer, and the ring is not used again.
    let file = file(&pattern(100));
    let (slow, feed) = rustix::pipe::pipe().unwrap();
    let Some(mut ring) = ring() else { return };
    let mut memory = [[0; 5], [0; 5]];
    let [late, early] = &mut memory;
    let mut list = List::new(vec![
        Read::new(slow.as_fd(), 0, Buffer::Borrowed(late), 5, 0),
        Read::new(file.as_fd(), 0, Buffer::Borrowed(early), 5, 1),
    ]);
    list.panics = true;
    let unwound = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(std::time::Duration::from_millis(100));
            rustix::io::write(&feed, b"later").unwrap();
        });
        catch_unwind(AssertUnwindSafe(|| ring.run(64, &mut list)))
    });
    assert!(unwound.is_err() && ring.broken);
    assert_eq!(&memory[0], b"later");
}

#[test]
fn direct_reads_round_up_to_whole_pages() {
    // Promise: memory of its own is aligned, and a read past the end of the file is content with what was
    // wanted.
    let bytes = pattern(10_000);
    let file = file(&bytes);
    if crate::fs::direct::set_direct(file.as_fd(), true, Aligned::TO).is_err() {
        return eprintln!("not run: no direct reads here");
    }
    file.sync_all().unwrap();
    let Some(mut ring) = ring() else { return };
    let mut own = Aligned::default();
    own.resize(12_288);
    assert_eq!(own.bytes().as_ptr().addr() % Aligned::TO, 0);
    let read = Read::new(file.as_fd(), 0, Buffer::Owned(own), 10_000, 0);
    let mut list = List::new(vec![read]);
    ring.run(4, &mut list);
    let read = &mut list.done[0];
    assert_eq!((read.got, read.error), (10_000, None));
    assert!(read.buffer.bytes()[..10_000] == bytes);
}

struct Names<'a>(Vec<Stat<'a>>, Vec<Stat<'a>>);

impl<'a> Work<Stat<'a>> for Names<'a> {
    fn next(&mut self) -> Option<Stat<'a>> {
        self.0.pop()
    }
    fn done(&mut self, operation: Stat<'a>) {
        self.1.push(operation);
    }
}

#[test]
fn names_are_described() {
    // Promise: kind and size of the entry itself, or why not; the same by plain calls.
    let temp = tempfile::tempdir().unwrap();
    std::fs::write(temp.path().join("f"), [0; 77]).unwrap();
    std::os::unix::fs::symlink("f", temp.path().join("link")).unwrap();
    let dir = File::open(temp.path()).unwrap();
    let Some(mut ring) = ring() else { return };
    assert!(Stat::new(dir.as_fd(), "a\0b", 0).is_none());
    for broken in [false, true] {
        ring.broken = broken;
        ring.limit_workers(2);
        let ask = ["f", "link", "none"].iter().enumerate();
        let asked = ask.map(|(tag, name)| Stat::new(dir.as_fd(), name, tag).unwrap());
        let mut names = Names(asked.collect(), Vec::new());
        ring.run(2, &mut names);
        names.1.sort_by_key(|stat| stat.tag);
        let kinds: Vec<_> = names
            .1
            .iter()
            .map(|stat| stat.found.map(|(kind, _)| kind))
            .collect();
        let (file, link) = (
            rustix::fs::FileType::RegularFile,
            rustix::fs::FileType::Symlink,
        );
        assert_eq!(kinds, [Ok(file), Ok(link), Err(Errno::NOENT)]);
        assert_eq!(names.1[0].found.unwrap().1, 77);
    }
}
