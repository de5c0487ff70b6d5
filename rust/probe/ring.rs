//! Stat of many names on an `io_uring`.

use rustix::io::Errno;

use super::Answer;
use crate::fs::real::kind_of;
use crate::fs::{FileKind, Fs, Io, check_path, split_path};
use crate::store::Store;
use crate::threads::IO_THREADS;
use crate::uring::{DEPTH, Ring, Stat, Work};

impl<F: Fs> Store<F> {
    /// Answers names (index in `files`, open parent) as far as a ring can, and returns the others: all
    /// where there is none, those that are not allowed, and those whose directory was replaced.
    pub(super) fn on_ring<'d>(
        &self,
        names: &[(usize, &'d F::Dir)],
        files: &[&str],
        answers: &mut [Answer],
        judge: impl Fn(usize, Io<(FileKind, u64)>) -> Answer,
    ) -> Vec<(usize, &'d F::Dir)> {
        let Ok(mut ring) = Ring::new() else {
            return names.to_vec();
        };
        ring.limit_workers(u32::try_from(IO_THREADS).unwrap_or(16));
        let mut left = Vec::new();
        let mut work = Names {
            next: 0,
            ask: |at: usize| {
                let &(index, dir) = names.get(at)?;
                let file = files[index];
                let dir = self.fs.dir_fd(dir).filter(|_| check_path(file).is_ok());
                let stat = dir.and_then(|fd| Stat::new(fd, split_path(file).1, at));
                Some(stat.ok_or(at))
            },
            take: |at: usize, found: Option<Io<(FileKind, u64)>>| match found {
                None | Some(Err(Errno::STALE)) => left.push(names[at]),
                Some(found) => {
                    let index = names[at].0;
                    answers[index] = judge(index, found);
                }
            },
        };
        ring.run(DEPTH, &mut work);
        left
    }
}

/// `ask` gives the stat of a place, or the place if it cannot be asked; `take` what was found there.
struct Names<A, T> {
    next: usize,
    ask: A,
    take: T,
}

impl<'d, A, T> Work<Stat<'d>> for Names<A, T>
where
    A: Fn(usize) -> Option<Result<Stat<'d>, usize>>,
    T: FnMut(usize, Option<Io<(FileKind, u64)>>),
{
    fn next(&mut self) -> Option<Stat<'d>> {
        loop {
            let asked = (self.ask)(self.next)?;
            self.next += 1;
            match asked {
                Ok(stat) => return Some(stat),
                Err(at) => (self.take)(at, None),
            }
        }
    }

    fn done(&mut self, stat: Stat<'d>) {
        let found = stat.found.map(|(kind, size)| (kind_of(kind), size));
        (self.take)(stat.tag, Some(found));
    }
}
