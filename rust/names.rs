//! Names that are never given twice, and whether the maker of one is gone.

use std::fs;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::format::xxh3;
use crate::fs::check_path;

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

/// `v12` is 12; `v012` and `v+1` are nothing of ours.
pub fn version_of(name: &str) -> Option<u64> {
    let version: u64 = name.strip_prefix('v')?.parse().ok()?;
    (name == format!("v{version}")).then_some(version)
}

/// Checks that a path is a file's in a version directory, `v<k>/<name>`; returns why not. What gives
/// or takes names in a store asks this: `STORE` and `LOCK` lie beside the version directories, and
/// no name from data may mean them.
pub fn check_payload(path: &str) -> Result<(), &'static str> {
    check_path(path)?;
    in_version(path)
}

/// The same, but a temporary's name is one too: those of dead writers are removed by their names.
pub fn check_sweepable(path: &str) -> Result<(), &'static str> {
    match path.split_once('/') {
        Some((_, name)) if name.starts_with(TEMPORARY) => check_path(&name[1..])?,
        _ => check_path(path)?,
    }
    in_version(path)
}

fn in_version(path: &str) -> Result<(), &'static str> {
    match path.split_once('/') {
        Some((dir, name)) if version_of(dir).is_some() && !name.contains('/') => Ok(()),
        _ => Err("it is no payload file: those lie in version directories, v<k>/<name>"),
    }
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
    fn only_files_of_version_directories_are_payloads() {
        // Promise: whatever is asked for by data, nothing beside or below v<k>/<name> is meant.
        for good in ["v0/x", "v12/a.safetensors", "v18446744073709551615/x"] {
            assert_eq!(
                (check_payload(good), check_sweepable(good)),
                (Ok(()), Ok(()))
            );
        }
        assert!(check_sweepable("v1/.tmp-a-1-2-3").is_ok());
        assert!(check_payload("v1/.tmp-a-1-2-3").is_err());
        for bad in [
            "",
            "STORE",
            "LOCK",
            "v1",
            "v1/",
            "v1/a/b",
            "x/y",
            "STORE/x",
            "v/x",
            "v01/x",
            "v+1/x",
            "v1x/y",
            "v18446744073709551616/x",
            "../v1/x",
            "/v1/x",
            "v1/../x",
            "v1/.x",
            "v1/x y",
            "v1/.tmp-/../x",
            "v1/.tmp-a/b",
            "v1/.tmp-a b",
            ".tmp-x",
            "x/.tmp-a",
            "v01/.tmp-a",
        ] {
            assert!(check_payload(bad).is_err(), "{bad:?}");
            assert!(check_sweepable(bad).is_err(), "{bad:?}");
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
                .all(|name| name.len() == 32 && check_path(name).is_ok())
        );
    }
}
