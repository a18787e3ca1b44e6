//! How much the status may say: all tenants of a node share its NodeImage, and etcd refuses one that is too large, for all
//! of them.

use std::collections::{BTreeMap, BTreeSet};

use super::TagKey;
use kruise_api::go_json;
use kruise_api::node_image::{ImageTagStatus, NodeImageStatus};

/// To how many bytes the messages of a namespace are cut that has too much to say: as many as fit. They are few steps, so
/// that one message more seldom changes all the others.
const LENGTHS: [usize; 6] = [1024, 512, 256, 128, 64, 0];
/// Stands for what was cut off.
const CUT: char = '…';

/// Cuts messages until the status has `most` bytes, as etcd has it; all else stays. A namespace whose messages need no more
/// than an equal part of the room keeps them whole. `namespaces` are those that a tag is pulled for.
#[must_use]
pub fn fit<'a>(
    mut status: NodeImageStatus,
    namespaces: impl Fn(&TagKey) -> BTreeSet<&'a str>,
    most: usize,
) -> NodeImageStatus {
    let whole = stored(&status);
    if whole <= most {
        return status;
    }
    let messages = messages(&status, namespaces);
    let all: usize = messages.values().map(|message| message.bytes).sum();
    let longest = longest(messages.values(), most.saturating_sub(whole.saturating_sub(all)));
    for (name, image) in &mut status.image_statuses {
        for tag in &mut image.tags {
            let message = messages.get(&key(name, tag));
            if let Some(most) = message.and_then(|message| longest.get(message.namespace)) {
                tag.message = tag.message.take().and_then(|text| cut(text, *most));
            }
        }
    }
    status
}

/// The status without messages.
#[must_use]
pub fn bare(mut status: NodeImageStatus) -> NodeImageStatus {
    let tags = status
        .image_statuses
        .values_mut()
        .flat_map(|image| &mut image.tags);
    tags.for_each(|tag| tag.message = None);
    status
}

/// The bytes of a status in etcd.
#[must_use]
pub fn stored(status: &NodeImageStatus) -> usize {
    go_json::length(&serde_json::to_string(status).unwrap_or_default())
}

/// A tag's message.
struct Message<'a> {
    /// On whose account it is.
    namespace: &'a str,
    bytes: usize,
}

/// The messages, each on account of the namespace that has the least to say of those that the tag is for: what one adds to
/// another's tag does not cut that.
fn messages<'a>(
    status: &NodeImageStatus,
    namespaces: impl Fn(&TagKey) -> BTreeSet<&'a str>,
) -> BTreeMap<TagKey, Message<'a>> {
    let mut tags = Vec::new();
    let mut of_namespace: BTreeMap<&str, usize> = BTreeMap::new();
    for (name, image) in &status.image_statuses {
        for tag in &image.tags {
            let Some(text) = &tag.message else { continue };
            let (key, bytes) = (key(name, tag), bytes(text));
            let namespaces = namespaces(&key);
            for namespace in &namespaces {
                *of_namespace.entry(namespace).or_default() += bytes;
            }
            tags.push((key, namespaces, bytes));
        }
    }
    let messages = tags.into_iter().map(|(key, namespaces, bytes)| {
        let least = namespaces
            .into_iter()
            .min_by_key(|namespace| (of_namespace.get(namespace), *namespace));
        let namespace = least.unwrap_or_default();
        (key, Message { namespace, bytes })
    });
    messages.collect()
}

/// How many bytes a message of a namespace may have, where not all fit into `room`: those that need least come first, and
/// what they leave of their equal part is for the others.
fn longest<'a, 'b: 'a>(
    messages: impl Iterator<Item = &'a Message<'b>>,
    mut room: usize,
) -> BTreeMap<&'b str, usize> {
    let mut namespaces: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for message in messages {
        namespaces
            .entry(message.namespace)
            .or_default()
            .push(message.bytes);
    }
    let mut namespaces: Vec<_> = namespaces.into_iter().collect();
    namespaces.sort_by_key(|(name, bytes)| (bytes.iter().sum::<usize>(), *name));
    let mut rest = namespaces.len();
    let mut longest = BTreeMap::new();
    for (name, bytes) in namespaces {
        let part = room / rest.max(1);
        let cut_to = |most: usize| bytes.iter().map(|bytes| *bytes.min(&most)).sum::<usize>();
        let mut lengths = [usize::MAX].into_iter().chain(LENGTHS);
        let most = lengths.find(|most| cut_to(*most) <= part).unwrap_or_default();
        longest.insert(name, most);
        room = room.saturating_sub(cut_to(most));
        rest -= 1;
    }
    longest
}

fn key(name: &str, tag: &ImageTagStatus) -> TagKey {
    TagKey {
        name: name.to_owned(),
        tag: tag.tag.clone(),
    }
}

/// The bytes of a message in etcd, with its field.
fn bytes(text: &str) -> usize {
    r#","message":"""#.len() + text.chars().map(go_json::width).sum::<usize>()
}

/// As much of a message as has `most` bytes.
fn cut(mut text: String, most: usize) -> Option<String> {
    if bytes(&text) <= most {
        return Some(text);
    }
    let mut left = most.checked_sub(bytes("") + CUT.len_utf8())?;
    let fits = |(_, c): &(usize, char)| {
        let width = go_json::width(*c);
        let fits = width <= left;
        left = left.saturating_sub(width);
        fits
    };
    let end = text
        .char_indices()
        .take_while(fits)
        .last()
        .map_or(0, |(at, c)| at + c.len_utf8());
    text.truncate(end);
    text.push(CUT);
    Some(text)
}
