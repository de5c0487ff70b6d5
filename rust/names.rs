//! Names that are never given twice, and whether the maker of one is gone.

use std::fs;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::format::xxh3;

/// Every temporary starts with this; readers pass it over.
pub const TEMPORARY: &str = ".tmp-";

/// Every directory on its way out starts with this.
pub const TRASH: &str = ".trash-";

/// Where the boot cannot be told: nobody is ever found dead under this.
const NO_BOOT: &str = "00000000";

/// This process, as temporaries name it: `<bootid8>-<pid>-<starttime>`.
///
/// A pid means nothing beyond its boot and its pid namespace, so `bootid8` is a hash of both:
/// containers on one host share the boot id but not the pids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Maker(String);

impl Maker {
    /// Asked anew each time: a forked child is another maker.
    pub fn current() -> Self {
        let pid = std::process::id();
        Self(format!("{}-{pid}-{}", boot(), start_time(pid).unwrap_or(0)))
    }

    /// A fresh `.tmp-<bootid8>-<pid>-<starttime>-<rand>`.
    pub fn temporary(&self) -> String {
        format!("{TEMPORARY}{}-{}", self.0, &unique()[..16])
    }

    /// A fresh `.trash-<what>-<bootid8>-<pid>-<starttime>-<rand>`.
    pub fn trash(&self, what: &str) -> String {
        format!("{TRASH}{what}-{}-{}", self.0, &unique()[..16])
    }
}

/// A fresh `.tmp-<bootid8>-<pid>-<starttime>-<rand>`.
pub fn temporary_name() -> String {
    Maker::current().temporary()
}

/// 32 hex digits that no other call gives.
pub fn unique() -> String {
    format!("{:032x}", random())
}

/// Whether the maker of a temporary (or trash) of that name is provably gone; false for names of
/// another boot, host or pid namespace, and for names not made here.
pub fn owner_is_dead(name: &str) -> bool {
    if !name.starts_with(TEMPORARY) && !name.starts_with(TRASH) {
        return false;
    }
    let mut parts = name.rsplit('-').skip(1);
    let (Some(start), Some(pid), Some(made_in)) = (parts.next(), parts.next(), parts.next()) else {
        return false;
    };
    let (Ok(start), Ok(raw)) = (start.parse::<u64>(), pid.parse::<u32>()) else {
        return false;
    };
    if made_in == NO_BOOT || made_in != boot() || start == 0 {
        return false;
    }
    let Some(pid) = i32::try_from(raw).ok().and_then(Pid::from_raw) else {
        return false;
    };
    match test_kill_process(pid) {
        Err(Errno::SRCH) => true,
        // Where /proc hides other users' processes, the number alone proves nothing.
        _ => start_time(raw).is_some_and(|now| now != start),
    }
}

fn boot() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let namespace = fs::read_link("/proc/self/ns/pid");
    match (id, namespace) {
        (Ok(id), Ok(namespace)) => {
            let both = format!("{} {}", id.trim(), namespace.display());
            format!("{:08x}", xxh3(both.as_bytes()) >> 32)
        }
        _ => NO_BOOT.into(),
    }
}

/// Field 22 of `/proc/<pid>/stat`; the second may itself hold spaces and parentheses.
fn start_time(pid: u32) -> Option<u64> {
    let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let text = String::from_utf8_lossy(&text);
    text.rsplit_once(')')?
        .1
        .split_whitespace()
        .nth(19)?
        .parse()
        .ok()
}

fn random() -> u128 {
    let mut bytes = [0; 16];
    let mut done = 0;
    while done < bytes.len() {
        match getrandom(&mut bytes[done..], GetRandomFlags::empty()) {
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(errno) => panic!("getrandom: {errno}"),
        }
    }
    u128::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_provably_dead_are_dead() {
        // Promise: a live writer's temporary is never taken for dead; a reused pid is seen through.
        let own = temporary_name();
        assert!(own.starts_with(".tmp-") && !owner_is_dead(&own));
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep");
        let pid = child.id();
        let start = start_time(pid).expect("alive");
        let name = format!(".tmp-{}-{pid}-{start}-00", boot());
        assert!(!owner_is_dead(&name));
        assert!(!owner_is_dead(&format!(".tmp-{}-{pid}-0-00", boot())));
        assert!(owner_is_dead(&format!(
            ".tmp-{}-{pid}-{}-00",
            boot(),
            start + 1
        )));
        child.kill().expect("kill");
        child.wait().expect("wait");
        assert!(owner_is_dead(&name));
        assert!(owner_is_dead(&name.replace(".tmp-", ".trash-step_3-")));
        assert!(!owner_is_dead(&name.replace(&boot(), "deadbeef")));
        for odd in ["", ".tmp-", ".tmp-a-b", "x", ".tmp-a-b-c-d", &name[1..]] {
            assert!(!owner_is_dead(odd), "{odd}");
        }
    }

    #[test]
    fn names_are_fresh() {
        // Promise: a name is never given twice and is an allowed path component.
        let names: std::collections::HashSet<_> = (0..1000).map(|_| unique()).collect();
        assert_eq!(names.len(), 1000);
        assert!(
            names
                .iter()
                .all(|name| name.len() == 32 && crate::fs::check_path(name).is_ok())
        );
    }
}
