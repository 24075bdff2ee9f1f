//! Names, links, folders and attributes.

use torchfs_proto::attr::{Kind, SetAttr};
use torchfs_proto::msg::meta::{Done, Op, rename};
use torchfs_proto::{Code, Ino};

use crate::world::{World, raw};

#[test]
fn a_made_file_is_found_and_an_absent_one_is_an_answer() {
    let world = World::new();
    let mut a = world.client();
    let made = a.make(&world, Ino::ROOT, "f", Kind::File);
    assert_eq!((made.nlink, made.size, made.uid, made.gid), (1, 0, 10, 20));
    assert_eq!(a.lookup(&world, Ino::ROOT, "f"), Some(made));
    assert_eq!(a.lookup(&world, Ino::ROOT, "g"), None);
    assert_eq!(a.try_make(&world, Ino::ROOT, "f", Kind::File).unwrap_err().code, Code::Exists);
    assert_eq!(world.problems(), Vec::<String>::new());
}

#[test]
fn folders_count_their_folders() {
    let world = World::new();
    let mut a = world.client();
    let d = a.dir(&world, "d");
    a.make(&world, d, "e", Kind::Dir);
    a.make(&world, d, "f", Kind::File);
    assert_eq!(a.getattr(&world, d).nlink, 3);
    assert_eq!(a.getattr(&world, Ino::ROOT).nlink, 3);
    assert_eq!(a.rmdir(&world, Ino::ROOT, "d").unwrap_err().code, Code::NotEmpty);
    a.rmdir(&world, d, "e").unwrap();
    assert_eq!(a.getattr(&world, d).nlink, 2);
    a.unlink(&world, d, "f").unwrap();
    a.rmdir(&world, Ino::ROOT, "d").unwrap();
    assert_eq!(a.getattr(&world, Ino::ROOT).nlink, 2);
    assert_eq!(world.problems(), Vec::<String>::new());
}

#[test]
fn sgid_folders_hand_down_their_group() {
    let world = World::new();
    let mut a = world.client();
    let d = a.dir(&world, "d");
    let set = SetAttr { mode: Some(0o2775), gid: Some(77), ..SetAttr::default() };
    a.call(&world, Op::SetAttr { ino: d, set }).unwrap();
    let file = a.make(&world, d, "f", Kind::File);
    let dir = a.make(&world, d, "e", Kind::Dir);
    assert_eq!((file.gid, file.mode), (77, 0o755));
    assert_eq!((dir.gid, dir.mode), (77, 0o2755));
}

#[test]
fn a_change_of_owner_clears_suid_and_sgid_of_files() {
    let world = World::new();
    let mut a = world.client();
    let f = a.file(&world, "f");
    let mode = SetAttr { mode: Some(0o6755), ..SetAttr::default() };
    a.call(&world, Op::SetAttr { ino: f, set: mode }).unwrap();
    let own = SetAttr { uid: Some(5), ..SetAttr::default() };
    a.call(&world, Op::SetAttr { ino: f, set: own }).unwrap();
    let attr = a.getattr(&world, f);
    assert_eq!((attr.uid, attr.mode), (5, 0o755));
}

#[test]
fn hard_links_share_an_inode_until_the_last_goes() {
    let world = World::new();
    let mut a = world.client();
    let f = a.file(&world, "f");
    let Done::Attr(attr) = a.call(&world, Op::Link { ino: f, parent: Ino::ROOT, name: raw("g") }).unwrap()
    else {
        panic!()
    };
    assert_eq!(attr.nlink, 2);
    let (attr, held) = a.unlink(&world, Ino::ROOT, "f").unwrap();
    assert_eq!((attr.nlink, held), (1, false));
    // Two names of one inode: rename does nothing.
    a.call(&world, Op::Link { ino: f, parent: Ino::ROOT, name: raw("h") }).unwrap();
    a.rename(&world, (Ino::ROOT, "g"), (Ino::ROOT, "h"), 0).unwrap();
    assert_eq!(a.names(&world, Ino::ROOT), ["g", "h"]);
    assert_eq!(
        a.refused(&world, Op::Link { ino: Ino::ROOT, parent: Ino::ROOT, name: raw("x") }),
        Code::Permission
    );
    assert_eq!(world.problems(), Vec::<String>::new());
}

#[test]
fn rename_keeps_the_rules_of_posix() {
    let world = World::new();
    let mut a = world.client();
    let (d, e) = (a.dir(&world, "d"), a.dir(&world, "e"));
    let sub = a.make(&world, d, "sub", Kind::Dir).ino;
    let f = a.file(&world, "f");
    let code = |r: Result<(), torchfs_proto::Fault>| r.unwrap_err().code;
    assert_eq!(code(a.rename(&world, (Ino::ROOT, "d"), (sub, "x"), 0)), Code::Invalid);
    assert_eq!(code(a.rename(&world, (Ino::ROOT, "d"), (d, "x"), 0)), Code::Invalid);
    assert_eq!(code(a.rename(&world, (Ino::ROOT, "f"), (Ino::ROOT, "d"), 0)), Code::IsDir);
    assert_eq!(code(a.rename(&world, (Ino::ROOT, "d"), (Ino::ROOT, "f"), 0)), Code::NotDir);
    assert_eq!(code(a.rename(&world, (Ino::ROOT, "e"), (Ino::ROOT, "d"), 0)), Code::NotEmpty);
    assert_eq!(code(a.rename(&world, (Ino::ROOT, "none"), (Ino::ROOT, "x"), 0)), Code::NotFound);
    assert_eq!(code(a.rename(&world, (Ino::ROOT, "f"), (Ino::ROOT, "e"), rename::NOREPLACE)), Code::Exists);
    assert_eq!(code(a.rename(&world, (Ino::ROOT, "f"), (Ino::ROOT, "x"), rename::EXCHANGE)), Code::NotFound);
    a.rename(&world, (d, "sub"), (e, "sub"), 0).unwrap();
    assert_eq!((a.getattr(&world, d).nlink, a.getattr(&world, e).nlink), (2, 3));
    assert_eq!(a.lookup(&world, sub, "..").unwrap().ino, e);
    a.rename(&world, (Ino::ROOT, "e"), (Ino::ROOT, "d"), 0).unwrap();
    assert_eq!(a.names(&world, Ino::ROOT), ["d", "f"]);
    a.rename(&world, (Ino::ROOT, "f"), (e, "sub"), rename::EXCHANGE).unwrap();
    assert_eq!(a.lookup(&world, Ino::ROOT, "f").unwrap().ino, sub);
    assert_eq!(a.lookup(&world, e, "sub").unwrap().ino, f);
    assert_eq!(a.lookup(&world, sub, "..").unwrap().ino, Ino::ROOT);
    assert_eq!(world.problems(), Vec::<String>::new());
}

#[test]
fn cookies_survive_a_restart_and_are_not_reused() {
    let world = World::new();
    let mut a = world.client();
    for name in ["a", "b", "c", "d"] {
        a.file(&world, name);
    }
    let Done::Entries { entries, end } =
        a.call(&world, Op::ReadDir { ino: Ino::ROOT, cookie: 0, limit: 2, plus: true }).unwrap()
    else {
        panic!()
    };
    assert!(!end && entries[1].attr.is_some());
    let place = entries[1].cookie;
    a.unlink(&world, Ino::ROOT, "b").unwrap();
    a.file(&world, "b");
    let world = world.restart();
    let mut b = world.client();
    world.advance_ms(10_000);
    b.renew(&world);
    let Done::Entries { entries, end } =
        b.call(&world, Op::ReadDir { ino: Ino::ROOT, cookie: place, limit: 9, plus: false }).unwrap()
    else {
        panic!()
    };
    let names: Vec<_> = entries.iter().map(|e| e.name.to_vec()).collect();
    assert!(end);
    assert_eq!(names, [b"c", b"d", b"b"]);
}

#[test]
fn names_have_limits() {
    let world = World::new();
    let mut a = world.client();
    a.make(&world, Ino::ROOT, &"x".repeat(255), Kind::File);
    let long = a.try_make(&world, Ino::ROOT, &"x".repeat(256), Kind::File).unwrap_err();
    assert_eq!(long.code, Code::NameTooLong);
    for bad in [".", "..", "a/b", "a\0b"] {
        assert_eq!(a.try_make(&world, Ino::ROOT, bad, Kind::File).unwrap_err().code, Code::Invalid);
    }
}
